"""Errors of checkpoints that a user can fix outside of this program."""

from __future__ import annotations

from typing import Any

from shardwright.core.findings.errors import InputError


class CheckpointError(InputError):
    """A checkpoint cannot be written or read, or is invalid.

    ``code`` is the violated law: ``SW501`` boxes cover a tensor exactly once, ``SW503`` a checkpoint is intact,
    ``SW504`` no tensor is missing, unexpected, cast, or of another shape.
    """

    def __init__(self, message: str, *, code: str = "SW503") -> None:
        self.message, self.code = message, code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.message, self.code)


class DamagedError(CheckpointError):
    """A checkpoint is proven not to be what was saved: a digest does not match, bytes or a file are missing.

    A checkpoint that cannot be read now, or was written by another release, is not proven damaged.
    """


def _remake(kind: type[CheckpointError], message: str, code: str) -> CheckpointError:
    return kind(message, code=code)
