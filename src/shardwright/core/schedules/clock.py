"""A table run on a clock: when each action ends, how long each rank waits, and how much it holds at once.

The same run proves a table: a rank that waits for ever names what it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.schedules.actions import COMPUTES, Action, Kind, Table, ends, needs

Seconds = Callable[[Action], float]

UNIT: Mapping[Kind, float] = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
"""The times of the literature: each half of a backward pass takes as long as a forward pass."""


def unit_seconds(action: Action) -> float:
    """Computations take their unit, all else no time."""
    return UNIT.get(action.kind, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``seconds``: the end of the last action. ``busy``: the seconds in which each rank computes. ``live``: for each rank the most
    microbatches, by stage, that it held at once: those whose forward pass is done and whose gradients of weights are not.
    ``stuck``: the action that each rank waits for in vain; none if all have ended."""

    seconds: float
    busy: Sequence[float]
    live: Sequence[Mapping[int, int]]
    most_live: Sequence[int]
    stuck: Mapping[int, Action]

    @property
    def bubble(self) -> float:
        """The share of the time in which the ranks wait, in the mean."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds if self.seconds else 0.0


def run(table: Table, seconds: Seconds = unit_seconds, held: Callable[[int], float] = lambda _: 1) -> Run:
    """Runs each rank's actions in order, each as soon as what it needs is there.

    ``seconds``: of a computation, or of a transfer, for ``send`` and ``send_gradient``, which do not keep a rank from computing.
    A table without transfers (``schedules.py``) gets each output as soon as it is computed. ``held``: the weight of a live microbatch
    of a stage in ``most_live``'s comparison.
    """
    done: dict[tuple[Kind, int, int | None], float] = {}
    sent: dict[tuple[int, int], deque[Action]] = {}
    transfers = any(action.kind == "send" for actions in table.actions for action in actions)
    clock = [0.0] * table.ranks
    busy = [0.0] * table.ranks
    position = [0] * table.ranks
    live: list[dict[int, int]] = [{} for _ in range(table.ranks)]
    at_most: list[dict[int, int]] = [{} for _ in range(table.ranks)]
    most: list[float] = [0.0] * table.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(table, rank, action, done, sent, transfers=transfers)
                if ready is None:
                    break
                moved = True
                position[rank] += 1
                lasts = seconds(action)
                if action.kind in COMPUTES:
                    clock[rank] = max(clock[rank], ready) + lasts
                    busy[rank] += lasts
                    end = clock[rank]
                elif action.kind in ("send", "send_gradient"):
                    end = max(clock[rank], ready) + lasts
                    sent.setdefault((rank, _receiver(table, action)), deque()).append(action)
                else:
                    end = ready
                for kind in ends(action.kind):
                    done[kind, action.stage, action.microbatch] = end
                _count(action, live[rank])
                held_now = sum(number * held(stage) for stage, number in live[rank].items())
                if held_now > most[rank]:
                    most[rank], at_most[rank] = held_now, dict(live[rank])
    stuck = {
        rank: actions[position[rank]] for rank, actions in enumerate(table.actions) if position[rank] < len(actions)
    }
    return Run(
        seconds=max(clock),
        busy=busy,
        live=at_most,
        most_live=[sum(of_rank.values()) for of_rank in at_most],
        stuck=stuck,
    )


def _receiver(table: Table, action: Action) -> int:
    return table.rank_of(action.stage + (1 if action.kind == "send" else -1))


def _ready(
    table: Table,
    rank: int,
    action: Action,
    done: Mapping[tuple[Kind, int, int | None], float],
    sent: Mapping[tuple[int, int], deque[Action]],
    *,
    transfers: bool,
) -> float | None:
    """When an action may begin; None: not yet."""
    stage, kind, number = action
    if kind == "reduce":
        halves = [done.get(("weight_gradient", stage, one)) for one in range(table.microbatches)]
        ended = [end for end in halves if end is not None]
        return max(ended) if len(ended) == len(halves) else None
    if kind in ("receive", "receive_gradient"):
        step: Kind = "send" if kind == "receive" else "send_gradient"
        source = stage + (-1 if kind == "receive" else 1)
        queue = sent.get((table.rank_of(source), rank))
        # Between two ranks transfers arrive in the order in which they are sent.
        if not queue or queue[0] != Action(source, step, number):
            return None
        queue.popleft()
        return done[step, source, number]
    needed: list[tuple[Kind, int]]
    if kind in ("send", "send_gradient"):
        needed = [("forward" if kind == "send" else "input_gradient", stage)]
    else:
        needed = [
            (what, of) if of == stage else _from_neighbour(table, rank, what, stage, of, transfers=transfers)
            for what, of in needs(action, table.num_stages)
        ]
    found = [done.get((what, of_stage, number)) for what, of_stage in needed]
    known = [end for end in found if end is not None]
    return max(known, default=0.0) if len(known) == len(found) else None


def _from_neighbour(
    table: Table, rank: int, kind: Kind, stage: int, neighbour: int, *, transfers: bool
) -> tuple[Kind, int]:
    """What brings a neighbour's output to a rank: its computation, or the receive of it."""
    if not transfers or table.rank_of(neighbour) == rank:
        return kind, neighbour
    return ("receive" if kind == "forward" else "receive_gradient"), stage


def _count(action: Action, live: dict[int, int]) -> None:
    if action.kind == "forward":
        live[action.stage] = live.get(action.stage, 0) + 1
    elif action.kind in ("backward", "weight_gradient"):
        live[action.stage] = live.get(action.stage, 0) - 1
