"""Sources: which documents they have, and what is refused with which message."""

from __future__ import annotations

import json
import os
import re
import socket
import sysconfig
import time
from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.data import Document, documents


def texts(source: str | Path) -> list[str]:
    return [document.text.decode() for document in documents(source)]


def refusal(source: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        list(documents(source))
    return str(caught.value)


def written(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    data = "\ufeffline\r\nnaïve\x00\u2028end".encode()
    path = written(tmp_path / "a.txt", data)
    assert list(documents(str(path))) == [Document(name=str(path), text=data)]


def test_a_folder_is_read_recursively_and_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.txt", "B.txt", "a.txt", ".hidden.txt", ".git/config", "é.txt"):
        written(tmp_path / name, name)
    written(tmp_path / "m.jsonl", '{"text": "m1"}\n{"text": "m2"}\n')
    assert texts(tmp_path) == ["B.txt", "a.txt", "a/b/c.txt", "a/z.md", "b.txt", "m1", "m2", "é.txt"]


def test_order_does_not_depend_on_how_the_system_lists_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1", "a/2", "b/1", "c"):
        written(tmp_path / name, name)
    walk = os.walk

    def backwards(*args: object, **options: object) -> list[tuple[str, list[str], list[str]]]:
        return [(here, folders[::-1], names[::-1]) for here, folders, names in walk(*args, **options)][::-1]  # type: ignore[call-overload]

    expected = texts(tmp_path)
    monkeypatch.setattr(os, "walk", backwards)
    assert texts(tmp_path) == expected == ["a/1", "a/2", "b/1", "c"]


def test_a_linked_folder_is_read_and_a_loop_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "far/a.txt", "far")
    written(tmp_path / "data/b.txt", "near")
    (tmp_path / "data/link").symlink_to(tmp_path / "far")
    assert texts(tmp_path / "data") == ["near", "far"]
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    assert refusal(tmp_path / "data") == (
        f"{tmp_path}/data contains one folder twice, through a link: {tmp_path}/data and {tmp_path}/data/loop. "
        "Remove the link, so that no text is read twice."
    )


def test_stdlib_is_python_source_without_tests() -> None:
    start_s = time.thread_time()
    found = list(documents("stdlib"))
    assert time.thread_time() - start_s < 2
    folder = Path(sysconfig.get_path("stdlib"))
    names = [Path(document.name).relative_to(folder).as_posix() for document in found]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} < set(names)
    assert not {part for name in names for part in name.split("/")} & {"test", "tests", "site-packages", "__pycache__"}
    assert sum(len(document.text) for document in found) > 5_000_000
    assert found[names.index("os.py")].text == Path(os.__file__).read_bytes()
    assert list(documents("stdlib")) == found


def test_stdlib_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert refusal("stdlib") == (
        f"no source text of the Python standard library in {tmp_path}: this Python does not include it. "
        "Give a text file, a folder or a JSONL file."
    )


def test_a_path_that_does_not_exist() -> None:
    assert refusal("no/such") == (
        "cannot read data from no/such: No such file or directory. "
        "Give a text file, a folder, a JSONL file, or the word stdlib."
    )
    assert "embedded null byte" in refusal("no\0such")
    assert "Not a directory" in refusal(__file__ + "/below")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_without_permission(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / name, "text")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    # Not chmod: tests may run as a user who may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(path) == f"cannot read data from {path}: Permission denied"


def test_a_folder_below_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.txt", "text")
    written(tmp_path / "closed/b.txt", "text")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(tmp_path) == f"cannot read folder {tmp_path}/closed: Permission denied"


def test_a_folder_without_files(tmp_path: Path) -> None:
    written(tmp_path / ".cache/x", "hidden")
    assert refusal(tmp_path) == (
        f"no text in folder {tmp_path}: it has no files, not counting names that begin with a dot"
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "good")
    picture = written(tmp_path / "picture.png", b"\x89PNG\r\n")
    assert refusal(tmp_path) == (
        f"{picture} is not UTF-8 text: byte 0x89 at offset 0. Convert it, or move it out of the data."
    )
    latin = written(tmp_path / "latin.txt", "caf\xe9".encode("latin-1"))
    assert "byte 0xe9 at offset 3" in refusal(latin)


def test_what_is_neither_file_nor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == f"cannot read data from {tmp_path}/pipe: it is neither a file nor a folder"
    assert "neither a file nor a folder" in refusal("/dev/zero")
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes only
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("s.jsonl")
        assert "neither a file nor a folder" in refusal("s.jsonl")


def test_a_name_that_is_not_text_can_be_shown(tmp_path: Path) -> None:
    written(tmp_path / os.fsdecode(b"\xff.txt"), b"\xff")
    assert "\\udcff.txt is not UTF-8 text: byte 0xff at offset 0" in refusal(tmp_path)


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "one\nline"}),
        "",
        json.dumps({"url": "u", "text": "two \u2028 \x85"}, ensure_ascii=False),
        json.dumps({"text": "three \U0001f600"}),
        '{"text": ""}',
    ]
    path = written(tmp_path / "a.jsonl", "\n".join(lines) + "\r\n")
    assert list(documents(path)) == [
        Document(name=f"{path}:1", text=b"one\nline"),
        Document(name=f"{path}:3", text="two \u2028 \x85".encode()),
        Document(name=f"{path}:4", text="three \U0001f600".encode()),
        Document(name=f"{path}:5", text=b""),
    ]


WANTED = 'Each line is an object such as {"text": "..."}.'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": }', f"3:10: not JSON: Expecting value. {WANTED}"),
        ('{"text": "a"', f"3:13: not JSON: Expecting ',' delimiter. {WANTED}"),
        ("plain text", f"3:1: not JSON: Expecting value. {WANTED}"),
        ('["a"]', f"3: found a list, needed an object. {WANTED}"),
        ("null", f"3: found null, needed an object. {WANTED}"),
        ('{"txt": "a", "id": 1}', "3: no key 'text'; found keys: 'txt', 'id'. Rename 'txt' to 'text'."),
        ('{"content": "a"}', f"3: no key 'text'; found keys: 'content'. {WANTED}"),
        ("{}", f"3: no key 'text'; found keys: none. {WANTED}"),
        ('{"text": 5}', f"3: 'text' is a number, needed a string. {WANTED}"),
        (
            '{"text": "ab\\ud800"}',
            "3: 'text' has half of a surrogate pair, \\ud800, at character 2: that is not a character. "
            "Write both halves, or remove it.",
        ),
    ],
)
def test_jsonl_lines_that_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "good"}\n\n' + line + '\n{"text": "good"}\n')
    assert refusal(path) == f"{path}:{message}"


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": 1' + "0" * 5000 + "}"], ids=["deep", "long number"])
def test_jsonl_that_python_cannot_hold(line: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", line)
    assert re.match(rf"{path}:1: JSON that cannot be read: ", refusal(path))


def test_jsonl_that_is_not_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n')
    assert refusal(path) == (
        f"{path}:2 is not UTF-8 text: byte 0xff at offset 10. Convert it, or move it out of the data."
    )
