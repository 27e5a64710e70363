"""Forged checkpoints are refused in bounded time and memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwright.checkpoint import CheckpointError, DamagedError, open_checkpoint, verify
from tests.fuzz.running import memory_bound

LIMIT_S = 20


class HangsError(BaseException):
    """The test waits, or computes without an end."""


@contextmanager
def limited() -> Iterator[None]:
    """A time limit, also for a wait in a system call, and 1 GiB of memory."""

    def ring(*_: object) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        with memory_bound():
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(directory: Path) -> str:
    """The message with which a checkpoint is refused; it is not proven damaged, as its digests are right."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert not isinstance(caught.value, DamagedError)
    assert not verify(directory)["ok"]
    message = str(caught.value).replace(str(directory), "DIR")
    assert len(message) < 600
    assert message.isprintable()
    return message
