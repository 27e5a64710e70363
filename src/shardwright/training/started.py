"""How the run in a folder was started: the last start in its ``run.jsonl``, which ``runs/metrics/run_record.py`` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD_FILE = "run.jsonl"
MOST_BYTES = 64 * 1024**2
"""No file of records is longer: two lines for each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """``arguments``: those that type the run again, without its folder. ``directory``: the working directory of the command."""

    arguments: Sequence[str]
    directory: str


def last_start(out: Path) -> StartRecord | None:
    """How the run in a folder was started last; None where nothing says it. A line that a killed run left is passed over."""
    try:
        if (out / RECORD_FILE).stat().st_size > MOST_BYTES:
            return None
        text = (out / RECORD_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in reversed(text.split("\n")):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or record.get("event") != "start":
            continue
        arguments, directory = record.get("arguments"), record.get("directory")
        if isinstance(arguments, list) and arguments and all(isinstance(one, str) for one in arguments):
            return StartRecord(arguments=arguments, directory=directory if isinstance(directory, str) else ".")
    return None
