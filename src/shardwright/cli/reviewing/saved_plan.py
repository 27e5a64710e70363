"""Reading a plan or a lock from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.files import parse_json, read_text
from shardwright.locks.lock import HOW, MARK, Lock, is_lock, read_lock
from shardwright.locks.saved_plan import NotSavedError, check_plan

HOW_PLAN = "Write one with: shardwright plan MODEL --json > plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """``rows``: what ``difference`` compares. ``lock``: None for a plan from `plan --json`."""

    text: str
    rows: Mapping[str, Any]
    lock: Lock | None = None


def read_saved(path: str | Path) -> Saved:
    """A plan or a lock from a file.

    Raises InputError for a file that cannot be read, is not JSON, is neither, or is a lock of another format.
    """
    text, value = read_json_file(path)
    if is_lock(value):
        lock = read_lock(value, str(path))
        return Saved(text=text, rows=lock.rows, lock=lock)
    try:
        return Saved(text=text, rows=check_plan(value))
    except NotSavedError as why:
        raise why.within(str(path), "a plan", HOW_PLAN) from None


def read_saved_lock(path: str | Path) -> tuple[str, Lock]:
    """The text of a file and the lock in it. Raises InputError as ``read_saved`` does, and for a plan."""
    text, value = read_json_file(path)
    return text, read_lock(value, str(path))


def is_saved(name: str) -> bool:
    """Whether a name on the command line is the path of a plan or a lock, and not a layout."""
    if name.endswith(".json"):
        return True
    try:
        with Path(name).open("rb") as file:
            return MARK.encode() in file.read(64)
    except (OSError, ValueError):
        return False


def read_json_file(path: str | Path) -> tuple[str, Any]:
    """The text and the value of a file. Raises InputError where it cannot be read or is not JSON."""
    text = read_text(path)
    try:
        parse_json(text, str(path))
    except InputError as error:
        if f'"{MARK}"' not in text:
            raise
        raise InputError(f"{error}\n`lock` never writes half a file: something else has changed it. {HOW}") from None
    return text, json.loads(text)
