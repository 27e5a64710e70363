"""A file has the complete old or the complete new content, whatever interrupts the write."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.files import replace_text
from shardwright.files.replaced import LEFTOVER

KILLED = """
import os, signal, sys
from shardwright.files import replace_text

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, sys.argv[2], killed)
replace_text(sys.argv[1], "new" * 100_000)
"""


@pytest.mark.parametrize("before", ["fsync", "replace"])
def test_a_write_that_is_killed_leaves_the_old_file(before, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path), before], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text(encoding="utf-8") == "old"
    assert all(name.startswith(LEFTOVER) for name in set(os.listdir(tmp_path)) - {"a.json"})
    replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_a_new_file_and_one_in_place_of_another(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "eins\n")
    replace_text(str(path), "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    assert os.listdir(tmp_path) == ["a.json"]


def test_permissions_and_links_are_kept(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_text(link, "new")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8") == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "name", ["a b.json", "100%.json", "a:b,c.json", "a\nb.json", "ü" * 120, "-o", os.fsdecode(b"\xff.json")]
)
def test_odd_names(name, tmp_path):
    replace_text(tmp_path / name, "text")
    assert os.listdir(tmp_path) == [name]


def test_a_name_that_is_not_utf8_is_an_escape_of_json(tmp_path):

    path = tmp_path / "a.json"
    replace_text(path, json.dumps({"layout": os.fsdecode(b"\xff.yaml")}, ensure_ascii=False))
    assert path.read_bytes() == b'{"layout": "\\udcff.yaml"}'
    assert os.fsencode(json.loads(path.read_bytes())["layout"]) == b"\xff.yaml"


@pytest.mark.parametrize("failing", ["open", "fsync", "replace"])
def test_where_it_may_not_be_written_nothing_is_changed(failing, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")

    # Not chmod: tests may run as a user who may write everything.
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path if failing == "open" else os, failing, refused)
    with pytest.raises(InputError) as caught:
        replace_text(path, "new")
    monkeypatch.undo()
    assert str(caught.value) == f"{path}: cannot be written: Permission denied. Nothing was changed."
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_places_where_no_file_can_be(tmp_path):
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path / "gone" / "a.json", f"the folder {tmp_path / 'gone'} does not exist."),
        (tmp_path, "Is a directory. Nothing was changed."),
        (tmp_path / "file" / "a.json", "Not a directory. Nothing was changed."),
        (tmp_path / ("n" * 300), "File name too long. Nothing was changed."),
        (f"{tmp_path}/a\0b", "embedded null byte. Nothing was changed."),
    ):
        with pytest.raises(InputError) as caught:
            replace_text(path, "new")
        assert str(caught.value) == f"{path}: cannot be written: {why}"
    assert os.listdir(tmp_path) == ["file"]


def test_a_pipe_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"pipe: cannot be written: it is a device or a pipe"):
        replace_text(pipe, "new")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
