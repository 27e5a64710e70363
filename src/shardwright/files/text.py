"""Reads the text of a file, and makes errors that point into it."""

from __future__ import annotations

import os
import re
import select
import stat
import time
from pathlib import Path

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.position import Position, caret

MAX_BYTES = 256 * 1024 * 1024
"""The largest file that is read as text; the index of a model of 671 B parameters has 9 MB."""

WRITER_S = 2.0
"""How long a pipe may have no program that writes to it."""

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""The line breaks of YAML 1.1, so that line numbers here are those of the parser."""

_WINDOW = 100
"""Number of characters of a long line that an error shows."""


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises InputError if the file does not exist, cannot be read, is a folder, is larger than
    ``max_bytes`` or is not UTF-8. Pipes are read too, up to ``max_bytes``; one that nothing writes to is an error.
    """
    path = Path(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                data = _of_pipe(file.fileno(), path, max_bytes + 1)
            else:
                os.set_blocking(file.fileno(), True)
                data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise InputError(_no_such_file(path)) from None
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder. Name a file in it.") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to read this file.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{str(path)!r}: cannot be read: {reason}.") from None
    if len(data) > max_bytes:
        raise InputError(f"{path}: larger than {max_bytes:,} bytes, the limit for a text file. Is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # With a byte order mark, the decoder counts from after it, in the bytes of ``error.object``.
        bad, start = error.object, error.start
        line = bad.count(b"\n", 0, start) + 1
        raise InputError(
            f"{path}: not UTF-8 text: byte 0x{bad[start]:02x} on line {line}. Save the file as UTF-8."
        ) from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file. To open a pipe would otherwise wait for a program that writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _of_pipe(number: int, path: Path, most: int) -> bytes:
    """What a pipe gives until its end. Raises InputError where no program has it open for writing within ``WRITER_S``."""
    found, has_writer, deadline = bytearray(), False, time.monotonic() + WRITER_S
    while len(found) < most:
        try:
            part = os.read(number, min(1 << 16, most - len(found)))
        except BlockingIOError:
            has_writer = True
            select.select([number], [], [])
            continue
        found += part
        if not part:
            if found or has_writer:
                break
            if time.monotonic() > deadline:
                raise InputError(f"{path}: a pipe that no program writes to. Write to it, or name a file.")
            time.sleep(0.05)
    return bytes(found)


def place_of(text: str, index: int, source: str) -> Position:
    """The line and column of the character ``text[index]``.

    >>> str(place_of("a: 1\\nb: 2", 8, "x.yaml"))
    'x.yaml:2:4'
    """
    line, line_start = 1, 0
    for match in _LINE_BREAK.finditer(text, 0, index):
        line, line_start = line + 1, match.end()
    return Position(source=source, line=line, column=index - line_start + 1)


def error_at(message: str, text: str, position: Position, length: int = 1) -> InputError:
    """An error with its position, the line at that position and a caret under ``length`` characters of it.

    >>> print(error_at("'b' is here.", "a: 1\\nb: 2", Position(source="x.yaml", line=2, column=1)))
    x.yaml:2:1: 'b' is here.
        b: 2
        ^
    """
    lines = _LINE_BREAK.split(text)
    line = lines[position.line - 1] if position.line <= len(lines) else ""
    column = min(position.column - 1, len(line))
    # A tab or an invisible character would misplace the caret.
    line = "".join(char if char.isprintable() else " " for char in line)
    if not line.strip():
        return InputError(f"{position}: {message}")
    first = max(0, min(column - _WINDOW // 2, len(line) - _WINDOW))
    shown = line[first : first + _WINDOW]
    before = "..." if first else ""
    after = "..." if first + _WINDOW < len(line) else ""
    start = column - first
    stop = min(start + max(1, length), max(len(shown), start + 1))
    return InputError(
        f"{position}: {message}\n{caret(before + shown + after, len(before) + start, len(before) + stop)}"
    )


_KINDS = {".yml": ".yaml"}
"""File endings of the same format."""


def _no_such_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: no such file; the folder {folder} does not exist."
    try:
        kind = _KINDS.get(path.suffix, path.suffix)
        files = (entry for entry in folder.iterdir() if entry.is_file())
        near = nearest(
            path.name, (each.name for each in files if not kind or _KINDS.get(each.suffix, each.suffix) == kind)
        )
    except OSError:
        near = None
    return f"{path}: no such file." + (f" Did you mean '{near}'?" if near else "")
