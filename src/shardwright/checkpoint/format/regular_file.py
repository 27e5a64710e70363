"""Opens a file of a checkpoint for reading. A pipe would block, and a device might never end."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import cast


def open_regular(path: Path) -> FileIO:
    """Opens a regular file, or a link to one, unbuffered. Raises OSError, also for a pipe, a device or a socket."""
    mode = path.stat().st_mode
    # For a folder, open() itself raises.
    if not S_ISREG(mode) and not S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return cast(FileIO, path.open("rb", buffering=0))
