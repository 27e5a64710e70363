"""How far a process is, as it tells the others now and then, and how it is noticed that one has stopped.

Silence is counted in ticks of whoever listens and not on a clock: where that process was stopped itself, with the whole
run or with its machine, nothing is held against the others.
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
"""Who was heard within so many ticks answers. Of anyone else nothing is said before it is known that it is silent."""


def tick_s(stall_timeout_s: float) -> float:
    """How often a process tells how far it is, in seconds.

    >>> tick_s(300), tick_s(30), tick_s(3600)
    (5.0, 0.5, 5.0)
    """
    return min(MAX_TICK_S, stall_timeout_s / TICKS)


class Beat(NamedTuple):
    """How far a process is. ``done``: its last step; ``stepping``: within the next one; ``longest_s``: of its own steps."""

    done: int = 0
    stepping: bool = False
    longest_s: float = 0.0


class Pace:
    """What a process knows of its own steps. One thread takes them, another one tells of them."""

    def __init__(self) -> None:
        self._beat = Beat()
        self._changed = threading.Lock()

    @property
    def beat(self) -> Beat:
        with self._changed:
            return self._beat

    @contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        """Step ``number`` is under way while the block lasts."""
        with self._changed:
            self._beat = self._beat._replace(done=number - 1, stepping=True)
        started = time.monotonic()
        yield
        took = time.monotonic() - started
        with self._changed:
            self._beat = Beat(number, stepping=False, longest_s=max(self._beat.longest_s, took))


class Stall(NamedTuple):
    """Who is silent, for how long, and the last step that was done before. Nobody: all answer, and none goes on."""

    members: tuple[int, ...]
    for_s: float
    since_step: int
    longest_s: float


class Watch:
    """Listens for those that it is told of, and counts how long each has been silent, and all without a step done."""

    def __init__(self, members: Iterable[int], stall_timeout_s: float) -> None:
        self._limit_s, self.tick_s = stall_timeout_s, tick_s(stall_timeout_s)
        self._silent = dict.fromkeys(members, 0)
        self._beats: dict[int, Beat] = {}
        self._idle = 0

    def heard(self, member: int, beat: Beat | None = None) -> None:
        """A member was heard, and how far it is, where it said so."""
        if member in self._silent:
            self._silent[member] = 0
        if beat is not None and self._beats.get(member) != beat:
            self._beats[member], self._idle = beat, 0

    def forget(self, member: int) -> None:
        """A member that has left, or is waited for no longer."""
        self._silent.pop(member, None)

    def tick(self) -> Stall | None:
        """One more tick has passed; what has stalled by now."""
        self._silent = {member: ticks + 1 for member, ticks in self._silent.items()}
        self._idle += 1
        longest_s = max((beat.longest_s for beat in self._beats.values()), default=0.0)
        limit_s = self._limit_s + longest_s
        silent = tuple(member for member, ticks in self._silent.items() if ticks * self.tick_s > limit_s)
        if silent:
            return self.stall(silent)
        # The first step may compile or connect, and nothing is known of how long; and a checkpoint has a time of its own.
        stepping = longest_s > 0 and any(beat.stepping for beat in self._beats.values())
        answers = max(self._silent.values(), default=0) <= ANSWERS_TICKS
        if stepping and answers and self._idle * self.tick_s > limit_s:
            return Stall((), self._idle * self.tick_s, self._done, longest_s)
        return None

    def stall(self, members: tuple[int, ...]) -> Stall:
        """What is known of members that do not answer."""
        longest_s = max((beat.longest_s for beat in self._beats.values()), default=0.0)
        for_s = max(self._silent.get(member, 0) for member in members) * self.tick_s
        return Stall(members, for_s, self._done, longest_s)

    @property
    def _done(self) -> int:
        # All have had their part in a step that any has done.
        return max((beat.done for beat in self._beats.values()), default=0)


def stall_message(stall: Stall, named: Mapping[int, str], count: int, stall_timeout_s: float) -> str:
    """What has stalled, in words that end every process. ``named``: each of the silent ones, for a person."""
    since = f"since step {stall.since_step}" if stall.since_step else "since before the first step"
    limit = (
        f"That is longer than --stall-timeout, {stall_timeout_s:g} s, beyond the longest step, {stall.longest_s:.1f} s."
        if stall.for_s > stall_timeout_s + stall.longest_s
        else "An operation between the processes has failed for it."
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
    """A beat as it came over a channel."""
    done, stepping, longest_s = value
    return Beat(int(done), bool(stepping), float(longest_s))
