"""How often a store is asked: one answer proves neither that an object is missing nor that it is damaged.

A request that fails is repeated by the store's client, within the client's own bounds. Here is what is done about an answer that looks
like one and is wrong: it is asked for again, through another connection, until two answers agree or ``PAUSES_S`` are over.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shardwright.storage.client import NO_BUCKET, NO_CREDENTIALS, NOT_ALLOWED, UNREACHABLE, reconnect
from shardwright.storage.objects import REQUEST_BYTES, Entry, ObjectFile, entries, entry, read
from shardwright.storage.url import Url

PAUSES_S = (0.3, 1.0, 3.0)
"""Before each time that something is asked for again."""
FINAL = (NO_BUCKET, NO_CREDENTIALS, NOT_ALLOWED, UNREACHABLE)
"""Reasons that are about no object, or that the client has asked about again itself."""

Answer = TypeVar("Answer")


def settled(url: Url, ask: Callable[[], Answer], *, elsewhere: bool = True) -> Answer:
    """The answer that two requests in a row agree on. That there is no object is an answer. Each is through a connection of its own;
    the second without ``elsewhere`` through that of the first, where thousands of objects are asked for.

    Raises FileNotFoundError, and OSError where the store cannot be asked or no two of its answers agree.
    """
    before = _answer(ask)
    for number, pause_s in enumerate((0.0, *PAUSES_S)):
        time.sleep(pause_s)
        if elsewhere or number:
            reconnect(url)
        answer = _answer(ask)
        if _same(before, answer):
            if isinstance(answer, OSError):
                raise answer
            return answer
        before = answer
    raise OSError(
        errno.EIO,
        f"{len(PAUSES_S) + 2} answers of the store about it differ from each other, so none is believed",
        str(url),
    )


def read_settled(url: Url, most_bytes: int) -> bytes:
    """All bytes of an object: those of the store's checksum, or those that two reads agree on. Raises as ``settled``."""
    with suppress(OSError):
        data = read(url, most_bytes)
        if entry(url).md5 == _md5(data):
            return data
    return settled(url, lambda: read(url, most_bytes), elsewhere=False)


def is_final(error: BaseException | None) -> bool:
    """Whether to ask again about the same object is of no use."""
    return isinstance(error, OSError) and error.strerror in FINAL


def doubt(url: Url, *, missing: bool) -> str | None:
    """Why the store's own word is against what was read of an object several times, or was not found; None: it confirms it.

    Its word is the object's size and its place in the listing of its folder, and its checksum where that is one of the bytes.
    Raises OSError where the store cannot be asked.
    """
    reconnect(url)
    listed = next((one for one in entries(url.parent) if one.name == url.name and not one.is_folder), None)
    said: Entry | None = None
    with suppress(FileNotFoundError):
        said = entry(url)
    if missing:
        there = listed is not None or (said is not None and not said.is_folder)
        return "the store says that it is there" if there else None
    if listed is None or said is None or listed.num_bytes != said.num_bytes:
        return "the store says now one thing of it, now another"
    if said.md5 is not None and _md5_of(url) != said.md5:
        return "the bytes that the store sends do not have the checksum that it gives"
    return None


def _answer(ask: Callable[[], Answer]) -> Answer | OSError:
    try:
        return ask()
    except FileNotFoundError as error:
        return error
    except OSError as error:
        if is_final(error):
            raise
        return error


def _same(first: object, second: object) -> bool:
    if isinstance(first, OSError) and isinstance(second, OSError):
        return (type(first), first.strerror) == (type(second), second.strerror)
    return not isinstance(first, OSError) and not isinstance(second, OSError) and first == second


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _md5_of(url: Url) -> str:
    hasher = hashlib.md5(usedforsecurity=False)
    with ObjectFile(url) as file:
        while data := file.read(REQUEST_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
