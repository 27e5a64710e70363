"""Reads the text of a file, and makes errors that point into it."""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.position import Position, caret

MAX_BYTES = 256 * 1024 * 1024
"""The largest file that is read as text; the index of a model of 671 B parameters has 9 MB."""

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""The line breaks of YAML 1.1, so that line numbers here are those of the parser."""

_WINDOW = 100
"""Number of characters of a long line that an error shows."""


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises InputError if the file does not exist, cannot be read, is a folder, is larger than
    ``max_bytes`` or is not UTF-8. Pipes are read too, up to ``max_bytes``.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
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
