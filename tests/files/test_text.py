"""Reading a file as text: each failure is one clear error."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.files import read_json, read_text, read_yaml
from shardwright.files.text import error_at, place_of


def message(path: str | Path, max_bytes: int = 1000) -> str:
    with pytest.raises(InputError) as caught:
        read_text(path, max_bytes)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_reads_utf8_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes("größe: 1\r\n".encode())
    (tmp_path / "marked").write_bytes("größe: 1\r\n".encode("utf-8-sig"))
    assert read_text(tmp_path / "plain") == read_text(str(tmp_path / "marked")) == "größe: 1\r\n"


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "ep-as-cp.yaml").touch()
    assert (
        message(tmp_path / "ep_as_cp.yaml") == f"{tmp_path}/ep_as_cp.yaml: no such file. Did you mean 'ep-as-cp.yaml'?"
    )
    assert message(tmp_path / "zzz") == f"{tmp_path}/zzz: no such file."
    assert message(tmp_path / "no" / "x.yaml") == (
        f"{tmp_path}/no/x.yaml: no such file; the folder {tmp_path}/no does not exist."
    )


def test_folder(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path}: this is a folder. Name a file in it."


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert message(tmp_path / "file" / "x.yaml") == f"'{tmp_path}/file/x.yaml': cannot be read: Not a directory."


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A permission bit would not stop a test that runs as root.
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert message(tmp_path / "x.yaml") == f"{tmp_path}/x.yaml: no permission to read this file."


def test_a_name_that_cannot_be_one() -> None:
    assert message("a\0b") == "'a\\x00b': cannot be read: embedded null byte."


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: gr\xf6\xdfe\n")
    assert message(path) == f"{path}: not UTF-8 text: byte 0xf6 on line 2. Save the file as UTF-8."
    path.write_bytes(b"\xef\xbb\xbfa: 1\n\nb: gr\xf6\xdfe\n")
    assert message(path) == f"{path}: not UTF-8 text: byte 0xf6 on line 3. Save the file as UTF-8."


def test_too_large(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b" " * 1001)
    assert message(path) == f"{path}: larger than 1,000 bytes, the limit for a text file. Is it the right file?"
    path.write_bytes(b" " * 1000)
    assert read_text(path, 1000) == " " * 1000


def test_reads_no_more_of_an_endless_file_than_the_limit() -> None:
    assert message("/dev/zero").startswith("/dev/zero: larger than 1,000 bytes")


def test_reads_a_pipe() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"mesh: 1")
    os.close(write_end)
    try:
        assert read_text(f"/dev/fd/{read_end}") == "mesh: 1"
    finally:
        os.close(read_end)


def test_empty_files(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    for text, what in (("", "the file is empty"), (" \n\n", "the file is empty"), ("# soon\n", "only comments")):
        path.write_text(text)
        with pytest.raises(InputError, match=what):
            read_yaml(path)
    path.write_text("\n")
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert str(caught.value) == f"{path}: the file is empty; it should hold JSON."


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\x85", "\u2028", "\u2029"])
def test_place_of_counts_what_yaml_counts_as_a_line(line_break: str) -> None:
    text = f"a: 1{line_break}b: 2"
    assert str(place_of(text, text.index("2"), "x")) == "x:2:4"


def test_caret_is_under_its_position_in_a_long_line() -> None:
    line = "x" * 300 + "!" + "y" * 300
    error = str(error_at("here.", line, Position(source="f", line=1, column=301)))
    _, shown, carets = error.splitlines()
    assert shown[carets.index("^")] == "!"
    assert shown.startswith("    ...xxx")
    assert shown.endswith("yyy...")
    assert len(shown) == 110


def test_caret_is_under_its_position_after_tabs_and_stops_at_the_end_of_the_line() -> None:
    error = str(error_at("here.", "\ta: bad\nc: 1", Position(source="f", line=1, column=5), length=20))
    assert error == "f:1:5: here.\n     a: bad\n        ^^^"


def test_a_position_after_the_last_line_has_no_caret() -> None:
    assert str(error_at("here.", "a: 1\n", Position(source="f", line=2, column=1))) == "f:2:1: here."
    assert str(error_at("here.", "a: 1", Position(source="f", line=9, column=1))) == "f:9:1: here."


def test_a_pipe_that_no_program_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    before = time.monotonic()
    assert message(path) == f"{path}: a pipe that no program writes to. Write to it, or name a file."
    assert time.monotonic() - before < 10


def test_a_slow_writer_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("w") as file:
            for part in ("mesh:", " 1"):
                time.sleep(0.3)
                file.write(part)
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(path) == "mesh: 1"
    writer.join()


def test_a_yaml_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="larger than 4,194,304 bytes"):
        read_yaml(path)
