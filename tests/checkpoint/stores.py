"""Checkpoints in an object store in memory, whose requests can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shardwright.checkpoint import open_checkpoint, save_checkpoint, verify
from shardwright.storage.url import Url
from tests.checkpoint.states import State, point, same_bits, small_state
from tests.storage.faulty import FaultyFileSystem, Killed

OUT = Url("faulty://store/run")
RUN = "5f0c9a17"
STATE = small_state()


def save_there(step: int, state: State = STATE, run: str | None = RUN, keep: int | None = None) -> Url:
    found = save_checkpoint(OUT, point(step), state.infos, state.owned, keep=keep, run=run)
    assert isinstance(found, Url)
    return found


@contextmanager
def last_request(number: int, error: BaseException | None = None) -> Iterator[list[str]]:
    """The process is killed at request ``number`` that changes the store; or that request alone fails with ``error``.

    Gives the requests that were made.
    """
    made: list[str] = []

    def before(request: str, path: str) -> None:
        del path
        made.append(request)
        if len(made) - 1 == number and error is not None:
            raise error
        if len(made) > number and error is None:
            raise Killed

    kept = FaultyFileSystem.before
    FaultyFileSystem.before = before
    try:
        yield made
    finally:
        FaultyFileSystem.before = kept


def grow_old(hours: float) -> None:
    for one in FaultyFileSystem.store.values():
        one.created = one.modified = datetime.now(UTC) - timedelta(hours=hours)


def contents(prefix: str) -> dict[str, bytes]:
    return {
        path.removeprefix(prefix): one.getvalue()
        for path, one in FaultyFileSystem.store.items()
        if path.startswith(prefix)
    }


def whole(directory: Url | Path, state: State = STATE) -> bool:
    checkpoint = open_checkpoint(directory)
    return verify(directory)["ok"] and all(
        same_bits(checkpoint.read_box(name), array) for name, array in state.arrays.items()
    )
