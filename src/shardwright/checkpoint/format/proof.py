"""What proves that a file of a checkpoint is damaged: on this machine one read of it, in a store several that agree with the store's word."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shardwright.checkpoint.format.errors import MISSING, CheckpointError, DamagedError
from shardwright.storage.files import system_of
from shardwright.storage.url import Place

Result = TypeVar("Result")


def proven(path: Place, read: Callable[[], Result]) -> Result:
    """The result of ``read``, which raises DamagedError where what it reads of ``path`` is not what was saved.

    In a store every error of it is first followed by other reads, with pauses, each through another connection; the first that
    succeeds counts. Raises DamagedError only where all of them found the same, and the store's word of the object is not against it;
    else CheckpointError, which proves nothing.
    """
    system = system_of(path)
    errors: list[CheckpointError] = []
    for pause_s in (0.0, *system.pauses_s):
        if errors:
            time.sleep(pause_s)
            system.reconnect(path)
        try:
            return read()
        except CheckpointError as error:
            if not system.pauses_s or system.is_final(error.__cause__):
                raise
            errors.append(error)
    last = errors[-1]
    if not isinstance(last, DamagedError):
        raise last
    if why := _doubt(path, errors, last):
        raise CheckpointError(
            f"{last.message} It was read {len(errors)} times, and {why}: so it may be intact. Nothing was changed. Try again later.",
            code=last.code,
        ) from last
    raise last


def _doubt(path: Place, errors: list[CheckpointError], last: DamagedError) -> str | None:
    if any(not isinstance(error, DamagedError) or error.read != last.read for error in errors):
        return "not always with the same result"
    try:
        return system_of(path).doubt(path, missing=last.read == MISSING)
    except OSError as error:
        return f"the store could not be asked about it ({error.strerror or error})"
