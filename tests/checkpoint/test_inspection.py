"""`ckpt show` and `ckpt verify` as data; and the format's page, which names every field."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, describe, save_checkpoint, saving, verify
from shardwright.checkpoint.folder.directory import delete
from shardwright.checkpoint.format import index, part
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.manifest import manifest_value
from shardwright.checkpoint.reading.opened import open_checkpoint
from shardwright.checkpoint.writing import save as save_module
from shardwright.cli.main import main
from shardwright.storage.local import LocalFiles
from tests.checkpoint.states import point, save, small_state

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def test_what_a_checkpoint_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "now", lambda: datetime(2026, 3, 1, 8, 15, 42, 999_999, tzinfo=UTC))
    directory = save(tmp_path, small_state())
    assert describe(directory) == {
        "directory": str(directory),
        "keep": {},
        "checkpoints": [
            {
                "directory": str(directory),
                "step": 10,
                "saved_at": "2026-03-01T08:15:42Z",
                "metrics": {},
                "kept_by": [],
                "seed": 3,
                "data_position": 80,
                "model": "llama3-test",
                "layout": {"name": "fsdp", "text": "name: fsdp\nmesh: {fsdp: 8}\n"},
                "mesh": {"data": 1, "fsdp": 8},
                "metadata": {"lr": 3e-4, "schedule": ["cosine", 100]},
                "bytes": 464,
                "num_files": 1,
                "tensors": [
                    {"name": "embed", "shape": [4, 8], "dtype": "float32", "spec": "spec of embed", "bytes": 128, "num_boxes": 2},
                    {"name": "scale", "shape": [6], "dtype": "bfloat16", "spec": "spec of scale", "bytes": 12, "num_boxes": 1},
                    {"name": "count", "shape": [], "dtype": "int32", "spec": "spec of count", "bytes": 4, "num_boxes": 1},
                ],
            }
        ],
        "damaged": [],
        "unread": [],
        "under_way": [],
        "leftovers": [],
    }  # fmt: skip


def test_an_intact_checkpoint(tmp_path: Path) -> None:
    directory = save(tmp_path, small_state())
    checked = {
        "directory": str(directory),
        "ok": True,
        "damaged": False,
        "step": 10,
        "num_boxes": 4,
        "bytes": 464,
        "problems": [],
    }
    assert verify(directory) == {
        "directory": str(directory),
        "ok": True,
        "checkpoints": [checked],
        "under_way": [],
        "leftovers": [],
        "unknown": [],
    }


def test_a_run_s_directory_means_all_of_its_checkpoints(tmp_path: Path) -> None:
    first, second = save(tmp_path, small_state(), step=5), save(tmp_path, small_state(), step=10)
    (first / "manifest.json").write_text("[]")
    for directory in (tmp_path, tmp_path / "checkpoints"):
        with saving(tmp_path, 20) as under_way:
            shown, checked = describe(directory), verify(directory)
        assert [item["directory"] for item in shown["checkpoints"]] == [str(second)]
        assert shown["damaged"] == [f"{first}/manifest.json: found [], needed a mapping."]
        assert [(item["directory"], item["ok"]) for item in checked["checkpoints"]] == [
            (str(second), True),
            (str(first), False),
        ]
        assert not checked["ok"]
        assert shown["under_way"] == checked["under_way"] == [under_way.directory.name]
        assert shown["leftovers"] == checked["leftovers"] == []
        assert json.loads(json.dumps([shown, checked])) == [shown, checked]


def test_a_step_that_a_run_deletes_meanwhile_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    """`ckpt` at the same time as a run with --keep, which deletes a step after `ckpt` has listed it."""
    first, second = save(tmp_path, small_state(), step=5), save(tmp_path, small_state(), step=10)

    def opened(directory: Path):
        if directory == first and first.exists():
            delete(first)
        return open_checkpoint(directory)

    monkeypatch.setattr("shardwright.checkpoint.inspection.open_checkpoint", opened)
    checked = verify(tmp_path)
    assert (checked["ok"], [item["directory"] for item in checked["checkpoints"]]) == (True, [str(second)])
    first = save(tmp_path, small_state(), step=6)
    shown = describe(tmp_path)
    assert (shown["damaged"], [item["directory"] for item in shown["checkpoints"]]) == ([], [str(second)])


@pytest.mark.parametrize("look", [describe, verify])
def test_the_step_that_was_asked_for_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    step = save(tmp_path, small_state(), step=5)

    def opened(directory: Path):
        delete(directory)
        return open_checkpoint(directory)

    monkeypatch.setattr("shardwright.checkpoint.inspection.open_checkpoint", opened)
    with pytest.raises(CheckpointError, match=re.escape(f"{step}: there is no checkpoint here.")):
        look(step)


@pytest.mark.parametrize("name", ["manifest.json", "boxes.index", "part-00000.index", "boxes-00000-00000.safetensors"])
def test_a_disk_that_cannot_read_proves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    step, opened = save(tmp_path, small_state(), step=5), LocalFiles.open

    def failing(self: LocalFiles, path: Path):
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(self, path)

    monkeypatch.setattr(LocalFiles, "open", failing)
    shown, checked = describe(tmp_path), verify(tmp_path)
    assert (shown["damaged"], len(shown["unread"]), shown["checkpoints"]) == ([], 1, [])
    assert [(item["ok"], item["damaged"]) for item in checked["checkpoints"]] == [(False, False)]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"unread   {step}  ")


@pytest.mark.parametrize("look", [describe, verify])
@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_directory_without_checkpoints(tmp_path: Path, look: Callable[[Path], object], name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        look(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name}: there is no checkpoint here. Give the --out of a run, or the directory of one step, "
        f"as in OUT/checkpoints/step-00000010."
    )


@pytest.mark.parametrize(
    ("file", "program", "word"),
    [
        (".metadata", "torch.distributed.checkpoint", "dcp"),
        ("_METADATA", "Orbax", "orbax"),
        ("model.safetensors.index.json", "Hugging Face", "huggingface"),
    ],
)
def test_a_folder_of_another_program(tmp_path: Path, file: str, program: str, word: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError) as caught:
        verify(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: this is a folder of {program}, and no checkpoint of ours. shardwright ckpt import {word} FOLDER --out OUT makes one "
        f"of it."
    )
    save(tmp_path, small_state())
    assert verify(tmp_path)["ok"]


def test_verify_names_every_file_that_does_not_belong(tmp_path: Path) -> None:
    directory = save(tmp_path, small_state())
    data = directory / "boxes-00000-00000.safetensors"
    strays = [
        "part-00001.index",
        ".hidden",
        "notes.txt",
        "x.safetensors",
        "boxes-00000-00000.safetensors.tmp",
        "a folder",
        "a link",
    ]
    for name in strays[:5]:
        (directory / name).write_bytes(b"x")
    (directory / strays[5]).mkdir()
    (directory / strays[6]).symlink_to("nowhere")
    expected = [f"{directory}/{name}: the manifest does not list this file. Move it away." for name in sorted(strays)]

    def found() -> list[str]:
        result = verify(directory)
        assert not result["ok"]
        return [problem["message"] for problem in result["checkpoints"][0]["problems"]]

    assert found() == expected
    data.rename(directory / "z.safetensors")
    missing, *others = found()
    assert missing.startswith(f"{data}: the file is missing.")
    assert others == [*expected, f"{directory}/z.safetensors: the manifest does not list this file. Move it away."]


def test_verify_names_what_is_beside_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = save(tmp_path, small_state()).parent
    for name in ("step-00000010.damaged-9d12c0b7", "step-00000020.set-aside-c1e80a3f", "step-00000010.bak"):
        (out / name).mkdir()
    (out / "notes.txt").touch()
    (out / "step-00000030").touch()
    result = verify(out)
    assert (result["ok"], result["unknown"]) == (True, ["notes.txt", "step-00000010.bak", "step-00000030"])
    assert main(["ckpt", "verify", str(out)]) == 0
    assert "never read: notes.txt, step-00000010.bak, step-00000030\n" in capsys.readouterr().out


def test_the_page_names_every_field_of_every_file(tmp_path: Path) -> None:
    state = small_state()
    optional = save_checkpoint(tmp_path, point(metrics={"loss": 2.5}), state.infos, state.owned, keep=3)
    value = manifest_value(replace(open_checkpoint(optional).manifest, folder="5f0c9a17-81d2e044"))
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*value, *part.ARRAYS, *index.ARRAYS]
    for arrays in (part.ARRAYS, index.ARRAYS):
        for name, (dtype, num_dims) in arrays.items():
            shape = r"(?!.*, 16\))" if num_dims == 1 else r".*, 16\)"
            assert re.search(rf"^\| `{name}` \| {dtype}(?=[ |]){shape}", page, re.MULTILINE), name
    for text in (value["index"], value["parts"][0], value["tensors"][0], value["layout"]):
        assert "`{" + ", ".join(text) + "}`" in page


def test_widths_are_those_of_the_libraries() -> None:
    for name, dtype in DTYPES.items():
        assert np.dtype(getattr(ml_dtypes, name, name)).itemsize == dtype.num_bytes


@pytest.mark.parametrize("call", [describe, verify])
@pytest.mark.parametrize("step", ["step-00000009", "step-00000009/"])
def test_a_step_that_is_not_there_is_no_intact_one(
    tmp_path: Path, call: Callable[[str], object], step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, small_state())
    directory = f"{tmp_path}/checkpoints/{step}"
    message = (
        f"{directory.rstrip('/')}: there is no checkpoint here. Give the --out of a run, or the directory of one step, as in "
        f"OUT/checkpoints/step-00000010."
    )
    with pytest.raises(CheckpointError) as raised:
        call(directory)
    assert str(raised.value) == message
    assert main(["ckpt", "verify" if call is verify else "show", directory]) == 2
    assert capsys.readouterr() == ("", f"shardwright: {message}\n")


HOLDS = """
import sys
from shardwright.checkpoint import saving
with saving(sys.argv[1], 20) as save:
    print(save.name, flush=True)
    sys.stdin.read()
"""


def test_a_save_of_another_process_is_under_way_until_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    save(tmp_path, small_state(), step=10)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        for verb in ("show", "verify"):
            assert main(["ckpt", verb, str(tmp_path)]) == 0
            printed = capsys.readouterr().out
            assert f"being saved now: {name}\n" in printed
            assert "left by" not in printed
        process.kill()
    for verb in ("show", "verify"):
        assert main(["ckpt", verb, str(tmp_path)]) == 0
        assert f"left by a save that did not finish, and never read: {name}\n" in capsys.readouterr().out


def test_the_first_save_of_a_run_is_under_way(tmp_path: Path) -> None:
    with saving(tmp_path, 20) as first:
        for look in (describe, verify):
            with pytest.raises(CheckpointError) as raised:
                look(tmp_path)
            assert str(raised.value) == (
                f"{tmp_path}: there is no checkpoint here yet: {first.directory.name} is being saved now."
            )


def test_to_look_disturbs_no_save(tmp_path: Path) -> None:
    """Saves and deletions, one after the other, while another thread looks at them all the time: none is ever called a leftover."""
    ended, seen = threading.Event(), list[str]()
    save(tmp_path, small_state(), step=1)

    def look() -> None:
        while not ended.is_set():
            seen.extend(describe(tmp_path)["leftovers"])

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        for step in range(2, 30):
            save(tmp_path, small_state(), step=step, keep=2)
        ended.set()
        looking.result()
    assert seen == []
