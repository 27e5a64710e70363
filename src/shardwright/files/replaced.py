"""Replaces a file atomically: it has the old content or the new, never a part of either."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from shardwright.core.findings.errors import InputError

LEFTOVER = ".shardwright-"
"""Prefix of the temporary file that a killed write leaves next to its target."""


def replace_text(path: str | Path, text: str) -> None:
    """Writes ``text`` to a new or existing file. A reader finds the complete old or the complete new content.

    The text is written to a temporary file in the same folder, made durable, and renamed. A link is followed and kept;
    a file keeps its permissions. Raises InputError if it cannot be written, and the file is then unchanged.
    """
    try:
        _replace(Path(os.path.realpath(path)), text)
    except FileNotFoundError:
        raise InputError(f"{path}: cannot be written: the folder {Path(path).parent} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be written: {reason}. Nothing was changed.") from None


def _replace(target: Path, text: str) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise ValueError("it is a device or a pipe, and a file takes its place")
    temporary = target.parent / f"{LEFTOVER}{secrets.token_hex(8)}"
    # A file name that is not UTF-8 is in the text as a lone surrogate. This writes it as an escape, which JSON can read.
    data = text.encode("utf-8", "backslashreplace")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
