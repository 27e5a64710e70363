"""Functions that fail on a rank, and one that does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(rank: int, num: int, path: Path) -> Iterator[None]:
    """Ranks without a process group: they only get their numbers."""
    assert not path.exists()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(num)
    yield


def who(word: str) -> tuple[str, str, str, int]:
    return word, os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid()


def raises(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise ValueError("on purpose")
    threading.Event().wait()


def ends(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os._exit(3)
    threading.Event().wait()


def hangs(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        threading.Event().wait()
