"""Heartbeats with the progress of each process, and detection of processes that have stopped.

Silence is counted in ticks of the listening process, not on a clock. If that process was stopped itself, with the whole
run or with its machine, no time counts against the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

TICKS = 60
MAX_TICK_S = 5.0
ANSWERS_TICKS = 6
"""A process that was heard within so many ticks counts as answering. Any other may still prove silent."""


def tick_s(stall_timeout_s: float) -> float:
    """The time between two heartbeats of a process, in seconds.

    >>> tick_s(300), tick_s(30), tick_s(3600)
    (5.0, 0.5, 5.0)
    """
    return min(MAX_TICK_S, stall_timeout_s / TICKS)


class Beat(NamedTuple):
    """The progress of a process. ``done``: its last step; ``stepping``: within the next; ``longest_s``: its longest step."""

    done: int = 0
    stepping: bool = False
    longest_s: float = 0.0


class Pace:
    """The progress of this process. One thread runs the steps, another one sends the heartbeats."""

    def __init__(self) -> None:
        self._beat = Beat()
        self._changed = threading.Lock()

    @property
    def beat(self) -> Beat:
        with self._changed:
            return self._beat

    @contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        """A context in which step ``number`` is under way."""
        with self._changed:
            self._beat = self._beat._replace(done=number - 1, stepping=True)
        started = time.monotonic()
        yield
        took = time.monotonic() - started
        with self._changed:
            self._beat = Beat(number, stepping=False, longest_s=max(self._beat.longest_s, took))


class Stall(NamedTuple):
    """The silent processes, for how long, and the last step done before. No members: all answer, and none makes progress."""

    members: tuple[int, ...]
    for_s: float
    since_step: int
    longest_s: float


class Watch:
    """Counts how long each of its members has been silent, and how long all have made no progress."""

    def __init__(self, members: Iterable[int], stall_timeout_s: float) -> None:
        self._limit_s, self.tick_s = stall_timeout_s, tick_s(stall_timeout_s)
        self._silent = dict.fromkeys(members, 0)
        self._beats: dict[int, Beat] = {}
        self._idle = 0

    def heard(self, member: int, beat: Beat | None = None) -> None:
        """Record that a member was heard, with its progress if it sent that."""
        if member in self._silent:
            self._silent[member] = 0
        if beat is not None and self._beats.get(member) != beat:
            self._beats[member], self._idle = beat, 0

    def forget(self, member: int) -> None:
        """Drop a member that has left, or is waited for no longer."""
        self._silent.pop(member, None)

    def tick(self) -> Stall | None:
        """Count one more tick. Returns what has stalled by now."""
        self._silent = {member: ticks + 1 for member, ticks in self._silent.items()}
        self._idle += 1
        longest_s = max((beat.longest_s for beat in self._beats.values()), default=0.0)
        limit_s = self._limit_s + longest_s
        silent = tuple(member for member, ticks in self._silent.items() if ticks * self.tick_s > limit_s)
        if silent:
            return self.stall(silent)
        # The first step may compile or connect, for an unknown time; and writing a checkpoint has its own timeout.
        stepping = longest_s > 0 and any(beat.stepping for beat in self._beats.values())
        answers = max(self._silent.values(), default=0) <= ANSWERS_TICKS
        if stepping and answers and self._idle * self.tick_s > limit_s:
            return Stall((), self._idle * self.tick_s, self._done, longest_s)
        return None

    def stall(self, members: tuple[int, ...]) -> Stall:
        """The stall of members that do not answer."""
        longest_s = max((beat.longest_s for beat in self._beats.values()), default=0.0)
        for_s = max(self._silent.get(member, 0) for member in members) * self.tick_s
        return Stall(members, for_s, self._done, longest_s)

    @property
    def _done(self) -> int:
        # A step that one process has done has been done with all of them.
        return max((beat.done for beat in self._beats.values()), default=0)


def stall_message(stall: Stall, named: Mapping[int, str], count: int, stall_timeout_s: float) -> str:
    """The message with which every process ends after a stall. ``named``: how to name each silent process to a person."""
    since = f"since step {stall.since_step}" if stall.since_step else "since before the first step"
    limit = (
        f"That is longer than --stall-timeout, {stall_timeout_s:g} s, beyond the longest step, {stall.longest_s:.1f} s."
        if stall.for_s > stall_timeout_s + stall.longest_s
        else "An operation between the processes has failed because of it."
    )
    ends = "So all end. Start all of them again, with --resume."
    if not stall.members:
        return (
            f"no step was done for {stall.for_s:.0f} s, {since}, though all {count} processes answer: they wait for each "
            f"other, for a device or for a file. {limit} {ends}"
        )
    shown = ", ".join(named[member] for member in stall.members[:5])
    shown += f" and {len(stall.members) - 5} more" if len(stall.members) > 5 else ""
    return f"{shown}: no answer for {stall.for_s:.0f} s, {since}: stopped, or the machine hangs. {limit} {ends}"


def beat_of(value: Any) -> Beat:
    """A beat from its JSON form."""
    done, stepping, longest_s = value
    return Beat(int(done), bool(stepping), float(longest_s))
