"""The object store of a run: recorded in the run's folder, with the key under which this run alone saves there."""

from __future__ import annotations

import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint import committed
from shardwright.checkpoint.folder.directory import steps_at
from shardwright.core.findings.errors import InputError
from shardwright.storage.files import write_durable
from shardwright.storage.url import Place

STORE_FILE = "checkpoints.txt"
"""In a run's folder: the URL of its checkpoints, its key, and the folder that it was made for, one line each."""
KEY = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run's folder says of its checkpoints. ``key``: eight hex digits, in the names of its saves; ``made_for``: a folder."""

    url: str
    key: str
    made_for: str


def recorded(out: Path) -> Recorded | None:
    """What the run in ``out`` has recorded, or None where it saves in ``out``."""
    with suppress(OSError, ValueError):
        url, key, made_for = (out / STORE_FILE).read_text(encoding="utf-8").splitlines()
        if KEY.fullmatch(key):
            return Recorded(url=url, key=key, made_for=made_for)
    return None


def key_of_run(out: Path, saved_under: Place) -> str | None:
    """The key of the run in ``out``, which this process has locked; None where it saves in a file system.

    The lock proves that what other processes began under this key is dead. Raises InputError where it cannot be written.
    """
    if steps_at(saved_under).locks:
        return None
    before = recorded(out)
    key, path = secrets.token_hex(4), out / STORE_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A copy of the folder may be another run at the same time: it gets a key of its own.
        this = f"{socket.gethostname()} {out.stat().st_ino}"
        if before is not None and (before.url, before.made_for) == (str(saved_under), this):
            return before.key
        # Of a run that was killed while it wrote this.
        (out / f"{STORE_FILE}.tmp").unlink(missing_ok=True)
        write_durable(path, f"{saved_under}\n{key}\n{this}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}.") from None
    return key


def require_store(out: Path, checkpoints: Place | None) -> None:
    """Raises InputError where a run that goes on saved in an object store that was not given again.

    Not where its folder has checkpoints: they may have been copied there.
    """
    before = recorded(out)
    if checkpoints is None and before is not None and not committed(out):
        raise InputError(
            f"--resume: the checkpoints of the run in {out} are in {before.url}. Give --checkpoints {before.url}."
        )
