"""What goes wrong with a checkpoint and can be mended outside of this program."""

from __future__ import annotations

from typing import Any

from shardwright.core.findings.errors import InputError


class CheckpointError(InputError):
    """A checkpoint that cannot be written, read or believed.

    ``code`` is the law that was broken: ``SW501`` boxes cover a tensor once, ``SW503`` a checkpoint is whole,
    ``SW504`` nothing is missing, extra, cast or mis-shaped.
    """

    def __init__(self, message: str, *, code: str = "SW503") -> None:
        self.message, self.code = message, code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.message, self.code)


class DamagedError(CheckpointError):
    """A checkpoint that is proven not to be what was saved: a digest does not match, bytes or a file are missing.

    What cannot be read now, or was written by another release, is not proven to be damaged.
    """


def _remake(kind: type[CheckpointError], message: str, code: str) -> CheckpointError:
    return kind(message, code=code)
