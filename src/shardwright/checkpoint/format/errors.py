"""Errors of checkpoints that a user can fix outside of this program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.escaped import escaped


class CheckpointError(InputError):
    """A checkpoint cannot be written or read, or is invalid.

    ``code`` is the violated law: ``SW501`` boxes cover a tensor exactly once, ``SW503`` a checkpoint is intact,
    ``SW504`` no tensor is missing, unexpected, cast, or of another shape. ``message`` is one line, ``lines`` those below it.
    They quote names in files that anybody may have written, so control characters are escaped.
    """

    def __init__(self, message: str, *, lines: Sequence[str] = (), code: str = "SW503") -> None:
        self.message, self.code = "\n".join(map(escaped, (message, *lines))), code
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.message, self.code)


MISSING = "missing"
"""What was read of a file that is not there."""


class DamagedError(CheckpointError):
    """A checkpoint is proven not to be what was saved: a digest does not match, bytes or a file are missing.

    A checkpoint that cannot be read now, or was written by another release, is not proven damaged. ``read``: equal for two errors
    if what was read was equal; a digest of it, or ``MISSING``.
    """

    def __init__(self, message: str, *, lines: Sequence[str] = (), code: str = "SW503", read: str = "") -> None:
        super().__init__(message, lines=lines, code=code)
        self.read = read


def proves_nothing(error: CheckpointError) -> bool:
    """Whether a checkpoint may be intact all the same: it could not be read, or not always with the same result."""
    return not isinstance(error, DamagedError) and isinstance(error.__cause__, OSError | MemoryError | DamagedError)


def _remake(kind: type[CheckpointError], message: str, code: str) -> CheckpointError:
    first, *lines = message.split("\n")
    return kind(first, lines=lines, code=code)
