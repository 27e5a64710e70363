"""Sources of text: a file, a folder, JSONL, or the source of the Python standard library.

| source | its documents |
|---|---|
| a text file | itself |
| ``*.jsonl``, ``*.ndjson`` | the ``text`` of each line, an object; its other keys are not used |
| a folder | those of each file below it, sorted by path; names that begin with a dot are skipped |
| ``stdlib`` | each ``.py`` file of the standard library, sorted by path, except tests and installed packages |

All text must be UTF-8. A file that is not is an error and is never skipped, so that the path determines the corpus.
"""

from __future__ import annotations

import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest
from shardwright.storage.url import Place

STDLIB = "stdlib"
"""The word for the standard library; a folder of this name is read as ``./stdlib``."""

_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document. ``text`` is UTF-8. ``name`` is its file, with the line number if the file holds several documents."""

    name: str
    text: bytes


def documents(source: str | Path) -> Iterator[Document]:
    """The documents of a source, read one at a time, in an order that depends only on the names of the files.

    Raises InputError, with the file and the line or byte, for what cannot be read or is not UTF-8, for a JSONL line
    that is not an object with a ``text``, and for a folder without files.
    """
    for path in _files(source):
        if path.suffix.lower() in _JSONL_SUFFIXES:
            yield from _jsonl_documents(path)
        else:
            with _opened(path) as file:
                text = file.read()
            yield Document(name=shown(path), text=_utf8(text, shown(path)))


def shown(path: str | Place) -> str:
    """The path in printable form: file names may contain bytes that are not text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be read, as reported by the system."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _files(source: str | Path) -> list[Path]:
    if source == STDLIB:
        return _stdlib_files()
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read data from {shown(path)}: {reason(error)}. "
            f"Give a text file, a folder, a JSONL file, or the word {STDLIB}."
        ) from error
    if not stat.S_ISDIR(mode):
        return [path]
    files = _files_below(path)
    if not files:
        raise InputError(f"no text in folder {shown(path)}: it has no files, not counting names that begin with a dot")
    return files


def _files_below(folder: Path) -> list[Path]:
    """Files of a folder and of those below it, following links, sorted by relative path."""
    found: list[tuple[str, Path]] = []
    visited: dict[str, str] = {}
    for here, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:
            raise InputError(
                f"{shown(folder)} contains one folder twice, through a link: {shown(visited[real])} and {shown(here)}. "
                "Remove the link, so that no text is read twice."
            )
        visited[real] = here
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(here, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(folder).as_posix(), path) for path in paths]
    return [path for _, path in sorted(found)]


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot read folder {shown(error.filename)}: {reason(error)}") from error


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, Path]] = []
    for here, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        paths = [Path(here, name) for name in names if name.endswith(".py")]
        found += [(path.relative_to(folder).as_posix(), path) for path in paths]
    if not found:
        raise InputError(
            f"no source text of the Python standard library in {folder}: this Python does not include it. "
            "Give a text file, a folder or a JSONL file."
        )
    return [path for _, path in sorted(found)]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # A pipe or a device could be read without end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"cannot read data from {shown(path)}: it is neither a file nor a folder")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read data from {shown(path)}: {reason(error)}") from error


def _utf8(data: bytes, name: str) -> bytes:
    try:
        if not data.isascii():
            data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}. "
            "Convert it, or move it out of the data."
        ) from error
    return data


def _jsonl_documents(path: Path) -> Iterator[Document]:
    # Bytes, so that only \n ends a line: Python would also split text at characters that JSON allows in a string.
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                name = f"{shown(path)}:{number}"
                text = _utf8(line.rstrip(b"\r\n"), name).decode()
                yield Document(name=name, text=_jsonl_text(text, name))


def _jsonl_text(line: str, name: str) -> bytes:
    expected = 'Each line is an object such as {"text": "..."}.'
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.colno}: not JSON: {error.msg}. {expected}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: JSON that cannot be read: {error}. {expected}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: found {_KINDS[type(value)]}, needed an object. {expected}")
    if "text" not in value:
        keys = ", ".join(repr(key) for key in value) or "none"
        like = nearest("text", value)
        hint = f"Rename {like!r} to 'text'." if like else expected
        raise InputError(f"{name}: no key 'text'; found keys: {keys}. {hint}")
    text = value["text"]
    if not isinstance(text, str):
        raise InputError(f"{name}: 'text' is {_KINDS[type(text)]}, needed a string. {expected}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}: 'text' has half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}: "
            "that is not a character. Write both halves, or remove it."
        ) from error


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}
