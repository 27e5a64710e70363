"""A table run on a clock: when each action ends, how long each rank waits, and how much it holds at once.

The same run proves a table: a rank that waits for ever names what it waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from shardwright.core.schedules.actions import COMPUTES, TOGETHER, Action, Kind, Table, ends, needs

Seconds = Callable[[Action], float]

UNIT: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
"""The times of the literature: each half of a backward pass takes as long as a forward pass."""


def unit_seconds(action: Action) -> float:
    """Computations take their unit, all else no time."""
    return UNIT.get(action.kind, 0.0)


Alike = tuple[int, Kind]
"""The actions of a stage that take equal times: those of one kind, for all microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``lasting``: the seconds of each computation and transfer. ``busy``: the seconds in which each rank computes. ``live``: for each rank
    the most microbatches, by stage, that it held at once: those whose forward pass is done and whose gradients of weights are not.

    What follows from the order of all ranks' actions is found when it is asked for: many plans are made only for their memory.
    """

    table: Table
    lasting: Mapping[Alike, float]
    busy: Sequence[float]
    live: Sequence[Mapping[int, int]]
    most_live: Sequence[int]

    @property
    def seconds(self) -> float:
        """The end of the last action."""
        return _last_end(_Same(self.table), tuple(self.lasting.items()))

    @property
    def stuck(self) -> Mapping[int, Action]:
        """The action that each rank waits for in vain; none if all have ended."""
        begun_by_rank = _played(_Same(self.table)).begun_by_rank
        return {
            rank: actions[begun]
            for rank, (actions, begun) in enumerate(zip(self.table.actions, begun_by_rank, strict=True))
            if begun < len(actions)
        }

    @property
    def bubble(self) -> float:
        """The share of the time in which the ranks wait, in the mean."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds if self.seconds else 0.0


def run(table: Table, seconds: Seconds = unit_seconds, held: Callable[[int], float] = lambda _: 1) -> Run:
    """Runs each rank's actions in order, each as soon as what it needs is there.

    ``seconds``: of a computation, or of a transfer, for ``send`` and ``send_gradient``, which do not keep a rank from computing; the same
    for all microbatches. A table without transfers (``schedules.py``) gets each output as soon as it is computed. ``held``: the weight
    of a live microbatch of a stage in ``most_live``'s comparison.
    """
    counted = _counted(_Same(table))
    lasting = {of: seconds(Action(*of)) for counts in counted for of in counts}
    live = [_most_held(actions, held) for actions in table.actions]
    return Run(
        table=table,
        lasting=lasting,
        # Exact, so that ranks with equal work are equal.
        busy=[fsum(number * lasting[of] for of, number in counts.items() if of[1] in COMPUTES) for counts in counted],
        live=live,
        most_live=[sum(of_rank.values()) for of_rank in live],
    )


SENDS = ("send", "send_gradient")
AT_ONCE, COMPUTING, SENDING = range(3)
"""What an action takes: no time, time in which its rank computes, or time in which its rank may compute."""


class Step(NamedTuple):
    """An action that can run. ``alike``: its place among ``Played.alike``; ``how``: what it takes. ``needed``: the steps that end before
    it begins, by their place in the order."""

    rank: int
    alike: int
    how: int
    needed: tuple[int, ...]


class Played(NamedTuple):
    """A table in an order in which each step comes after those that it needs, whatever the seconds of each are. ``begun_by_rank``: how many
    actions of each rank are among them; the next one waits for ever."""

    steps: Sequence[Step]
    alike: Sequence[Alike]
    begun_by_rank: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A table by its identity: to compare the actions of two would take as long as to run one."""

    table: Table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.table is other.table

    def __hash__(self) -> int:
        return id(self.table)


@lru_cache(maxsize=8)
def _counted(same: _Same) -> Sequence[Mapping[Alike, int]]:
    """For each rank the numbers of its computations and transfers."""
    return [
        Counter((one.stage, one.kind) for one in actions if one.kind in COMPUTES or one.kind in SENDS)
        for actions in same.table.actions
    ]


@lru_cache(maxsize=64)
def _last_end(same: _Same, lasting: Sequence[tuple[Alike, float]]) -> float:
    played, by_alike = _played(same), dict(lasting)
    lasts = [by_alike.get(of, 0.0) for of in played.alike]
    clock = [0.0] * same.table.ranks
    ended: list[float] = []
    # Hundreds of thousands of steps: as little as there can be for each.
    for rank, alike, how, needed in played.steps:
        ready = 0.0
        for one in needed:
            if ended[one] > ready:
                ready = ended[one]
        if how:
            if clock[rank] > ready:
                ready = clock[rank]
            ready += lasts[alike]
            if how == COMPUTING:
                clock[rank] = ready
        ended.append(ready)
    return max(clock)


@lru_cache(maxsize=8)
def _played(same: _Same) -> Played:
    table = same.table
    done: dict[tuple[Kind, int, int | None], int] = {}
    sent: dict[tuple[int, int], deque[Action]] = {}
    transfers = any(action.kind == "send" for actions in table.actions for action in actions)
    position = [0] * table.ranks
    steps: list[Step] = []
    alike: dict[Alike, int] = {}
    met: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in TOGETHER and action not in met:
                    if not _all_at(table, position, action):
                        break
                    met.add(action)
                needed = _needed(table, rank, action, done, sent, transfers=transfers)
                if needed is None:
                    break
                moved = True
                position[rank] += 1
                if action.kind in SENDS:
                    sent.setdefault((rank, _receiver(table, action)), deque()).append(action)
                for kind in ends(action.kind):
                    done[kind, action.stage, action.microbatch] = len(steps)
                number = alike.setdefault((action.stage, action.kind), len(alike))
                how = COMPUTING if action.kind in COMPUTES else SENDING if action.kind in SENDS else AT_ONCE
                steps.append(Step(rank, number, how, needed))
    return Played(steps, tuple(alike), position)


def _most_held(actions: Sequence[Action], held: Callable[[int], float]) -> Mapping[int, int]:
    """The microbatches of each stage that a rank holds when they weigh the most."""
    live: dict[int, int] = {}
    at_most: dict[int, int] = {}
    weights: dict[int, float] = {}
    now = most = 0.0
    for action in actions:
        stage, change = action.stage, LIVE.get(action.kind)
        if change is None:
            continue
        if stage not in weights:
            weights[stage] = held(stage)
        live[stage] = live.get(stage, 0) + change
        now += change * weights[stage]
        if now > most:
            most, at_most = now, dict(live)
    return at_most


LIVE: Mapping[Kind, int] = {"forward": 1, "backward": -1, "weight_gradient": -1}


def _all_at(table: Table, position: Sequence[int], action: Action) -> bool:
    return all(actions[at : at + 1] == [action] for actions, at in zip(table.actions, position, strict=True))


def _receiver(table: Table, action: Action) -> int:
    return table.rank_of(action.stage + (1 if action.kind == "send" else -1))


def _needed(
    table: Table,
    rank: int,
    action: Action,
    done: Mapping[tuple[Kind, int, int | None], int],
    sent: Mapping[tuple[int, int], deque[Action]],
    *,
    transfers: bool,
) -> tuple[int, ...] | None:
    """The steps that an action needs; None: not all of them have run."""
    stage, kind, number = action
    if kind == "reduce":
        halves = [done.get(("weight_gradient", stage, one)) for one in range(table.microbatches)]
        ended = tuple(step for step in halves if step is not None)
        return ended if len(ended) == len(halves) else None
    if kind in TOGETHER:
        return ()
    if kind in ("receive", "receive_gradient"):
        step: Kind = "send" if kind == "receive" else "send_gradient"
        source = stage + (-1 if kind == "receive" else 1)
        queue = sent.get((table.rank_of(source), rank))
        # Between two ranks transfers arrive in the order in which they are sent.
        if not queue or queue[0] != Action(source, step, number):
            return None
        queue.popleft()
        return (done[step, source, number],)
    needed: list[tuple[Kind, int]]
    if kind in ("send", "send_gradient"):
        needed = [("forward" if kind == "send" else "input_gradient", stage)]
    else:
        needed = [
            (what, of) if of == stage else _from_neighbour(table, rank, what, stage, of, transfers=transfers)
            for what, of in needs(action, table.num_stages)
        ]
    found = [done.get((what, of_stage, number)) for what, of_stage in needed]
    known = tuple(step for step in found if step is not None)
    return known if len(known) == len(found) else None


def _from_neighbour(
    table: Table, rank: int, kind: Kind, stage: int, neighbour: int, *, transfers: bool
) -> tuple[Kind, int]:
    """What brings a neighbour's output to a rank: its computation, or the receive of it."""
    if not transfers or table.rank_of(neighbour) == rank:
        return kind, neighbour
    return ("receive" if kind == "forward" else "receive_gradient"), stage
