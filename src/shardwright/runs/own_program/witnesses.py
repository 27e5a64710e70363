"""Which processes of a program have ended: those of one machine see it of each other, in /proc.

A collective that fails says no more than that a connection was closed. A process that is killed can say nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.core.findings.bounds import is_integer

WAIT_S = 1.0
"""The kernel closes the connections of a process a little before it is seen to have ended."""
POLL_S = 0.02

Witness = Mapping[str, Any]
"""A process as the others look for it: ``machine``, ``host``, ``pid`` and when it ``started``; JSON values."""


def this_process() -> Witness:
    return {
        "machine": _machine(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def ended(processes: Sequence[Witness], index: int) -> list[int]:
    """The numbers of those that have ended, as far as process ``index``, which is this one, can see it: on its machine."""
    seen = [
        number
        for number, one in enumerate(processes)
        if number != index and one["machine"] == processes[index]["machine"] and is_integer(one["started"])
    ]
    until = time.monotonic() + WAIT_S
    while True:
        gone = [number for number in seen if _started(processes[number]["pid"]) != processes[number]["started"]]
        if gone or not seen or time.monotonic() > until:
            return gone
        time.sleep(POLL_S)


def _machine() -> str:
    """The same text for processes that see each other by number: of one boot of one machine, in one namespace of numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process has started, in ticks since the boot; None for one that has ended, also if nobody has waited for it yet."""
    try:
        # The name of the program before it may have any characters.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZXx" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
