"""The computations of a table on a clock: when the last one ends, how long each rank waits, and how much it holds at once.

A transfer begins when what is sent has been computed, and keeps no rank from computing: so a table has its end without them
(``transfers.py``), and each output is at the next stage so many seconds after its computation.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum, inf
from operator import mul
from typing import NamedTuple

from shardwright.core.schedules.actions import COMPUTES, Action, Kind, Table

Seconds = Callable[[Action], float]

UNIT: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
"""The times of the literature: each half of a backward pass takes as long as a forward pass."""


def unit_seconds(action: Action) -> float:
    """Computations take their unit, all else no time."""
    return UNIT.get(action.kind, 0.0)


Alike = tuple[int, Kind]
"""The actions of a stage that take equal times: those of one kind, for all microbatches."""

SENDS: tuple[Kind, ...] = ("send", "send_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``lasting``: the seconds of each computation and transfer. ``busy``: the seconds in which each rank computes. ``live``: for each rank
    the most microbatches, by stage, that it held at once: those whose forward pass is done and whose gradients of weights are not.

    The end is found when it is asked for: many plans are made only for their memory.
    """

    table: Table
    lasting: Mapping[Alike, float]
    busy: Sequence[float]
    live: Sequence[Mapping[int, int]]
    most_live: Sequence[int]

    @property
    def seconds(self) -> float:
        """The end of the last computation."""
        return _last_end(self.table, tuple(self.lasting.items()))

    @property
    def bubble(self) -> float:
        """The share of the time in which the ranks wait, in the mean."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds if self.seconds else 0.0


def run(table: Table, seconds: Seconds = unit_seconds, held: Callable[[int], float] = lambda _: 1) -> Run:
    """Runs each rank's computations in order, each as soon as what it needs is there.

    ``seconds``: of a computation, or of a transfer to another rank, for ``send`` and ``send_gradient``; the same for all microbatches.
    ``held``: the weight of a live microbatch of a stage in ``most_live``'s comparison.
    """
    counted, held_by_rank = _counted(table), _held(table)
    stages = range(table.num_stages)
    sent: list[Alike] = [(stage, kind) for stage in stages for kind in SENDS if table.crosses(stage, kind)]
    lasting = {of: seconds(Action(*of)) for of in (*(of for counts in counted for of in counts), *sent)}
    weights = [held(stage) for stage in stages]
    live = [_heaviest(states, table.stages_of(rank), weights) for rank, states in enumerate(held_by_rank)]
    return Run(
        table=table,
        lasting=lasting,
        # Exact, so that ranks with equal work are equal.
        busy=[fsum(number * lasting[of] for of, number in counts.items()) for counts in counted],
        live=live,
        most_live=[sum(of_rank.values()) for of_rank in live],
    )


@lru_cache(maxsize=64)
def _counted(table: Table) -> Sequence[Mapping[Alike, int]]:
    """For each rank the numbers of its computations."""
    found: list[Mapping[Alike, int]] = []
    for actions in table.actions:
        numbers: Counter[Alike] = Counter((one.stage, one.kind) for one in actions)
        found.append({of: number for of, number in numbers.items() if of[1] in COMPUTES})
    return found


@lru_cache(maxsize=64)
def _last_end(table: Table, lasting: Sequence[tuple[Alike, float]]) -> float:
    line, of = _line(table), dict(lasting)
    lasts = [of[alike] for alike in line.alike]
    late = [of.get((stage + FROM[kind], SENT[kind]), 0.0) if kind in FROM else 0.0 for stage, kind in line.alike]
    ends = [0.0, -inf]
    add = ends.append
    # Hundreds of thousands of computations: as little as there can be for each.
    for before, needed, number in zip(line.before, line.needed, line.numbers, strict=True):
        now, ready = ends[before], ends[needed] + late[number]
        add((ready if ready > now else now) + lasts[number])
    return max(ends)


FROM: Mapping[Kind, int] = {"forward": -1, "backward": 1, "input_gradient": 1}
"""From which stage what a computation needs is sent: that before, or that behind."""

SENT: Mapping[Kind, Kind] = {"forward": "send", "backward": "send_gradient", "input_gradient": "send_gradient"}

NOTHING_BEFORE, NOTHING_NEEDED = 0, 1
"""The places of the first two ends, which are those of no computation."""


class _Line(NamedTuple):
    """All computations of a table, each after those that it waits for. ``before``: the place of the one before it on its rank; ``needed``: of
    that on another stage whose output it needs. The first computation has place 2. ``numbers``: its place in ``alike``."""

    alike: tuple[Alike, ...]
    before: array[int]
    needed: array[int]
    numbers: array[int]


@lru_cache(maxsize=64)
def _line(table: Table) -> _Line:
    stages, last = range(table.num_stages), table.num_stages - 1
    made: list[dict[int | None, int]] = [{} for _ in stages]
    made_back: list[dict[int | None, int]] = [{} for _ in stages]
    alike: dict[Alike, int] = {}
    line = _Line((), array("i"), array("i"), array("i"))
    newest, position = [NOTHING_BEFORE] * table.ranks, [0] * table.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table.actions):
            begun = position[rank]
            for at in range(begun, len(actions)):
                stage, kind, microbatch = actions[at]
                needed: int | None = NOTHING_NEEDED
                if kind == "forward" and stage:
                    needed = made[stage - 1].get(microbatch)
                elif kind in ("backward", "input_gradient"):
                    if microbatch not in made[stage]:
                        break
                    if stage < last:
                        needed = made_back[stage + 1].get(microbatch)
                elif kind == "weight_gradient" and microbatch not in made_back[stage]:
                    break
                if needed is None:
                    break
                position[rank] += 1
                if kind not in COMPUTES:
                    continue
                place = len(line.before) + 2
                line.before.append(newest[rank])
                line.needed.append(needed)
                line.numbers.append(alike.setdefault((stage, kind), len(alike)))
                newest[rank] = place
                if kind != "weight_gradient":
                    (made if kind == "forward" else made_back)[stage][microbatch] = place
            moved = moved or position[rank] > begun
    return line._replace(alike=tuple(alike))


State = tuple[int, ...]
"""The live microbatches of each stage of a rank."""


@lru_cache(maxsize=64)
def _held(table: Table) -> Sequence[Sequence[State]]:
    """For each rank, the different states in which one of its forward passes is followed by the end of another microbatch: in between it
    only holds more."""
    found: list[Sequence[State]] = []
    for rank, actions in enumerate(table.actions):
        live = dict.fromkeys(table.stages_of(rank), 0)
        states: dict[State, None] = {}
        grown = False
        for stage, kind, _ in actions:
            if kind == "forward":
                live[stage] += 1
                grown = True
            elif kind in ("backward", "weight_gradient"):
                if grown:
                    states[(*live.values(),)] = None
                    grown = False
                live[stage] -= 1
        if grown:
            states[(*live.values(),)] = None
        found.append([*states])
    return found


def _heaviest(states: Sequence[State], own: Sequence[int], weights: Sequence[float]) -> Mapping[int, int]:
    """The state that weighs the most, the first of equal ones, by the stages of ``own``."""
    weight_of = [weights[stage] for stage in own]
    most, at_most = 0.0, ()
    for state in states:
        weight = sum(map(mul, weight_of, state))
        if weight > most:
            most, at_most = weight, state
    return dict(zip(own, at_most, strict=False))
