"""A file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from shardwright.core.findings.errors import InputError

LEFTOVER = ".shardwright-"
"""What the name of a file begins with that a killed write has left beside the one it was to become."""


def replace_text(path: str | Path, text: str) -> None:
    """Put ``text`` into a file, new or in place of what it held: whoever reads it finds the old or the new, whole.

    Written beside it, made durable, and renamed. A link is followed and stays; a file keeps its permissions. Raises
    InputError where it cannot be written, and the file is then as it was.
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
    beside = target.parent / f"{LEFTOVER}{secrets.token_hex(8)}"
    # A name that is not UTF-8 is in a text as half a pair; JSON has it as an escape, which this writes.
    data = text.encode("utf-8", "backslashreplace")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
