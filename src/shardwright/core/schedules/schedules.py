"""The schedules of pipelines: each name with its order, its placement, and what it asks of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.core.layout.roles import SCHEDULES as NAMES
from shardwright.core.schedules import orders
from shardwright.core.schedules.actions import Action, Kind, Placement, Table, stages_of

KINDS: Mapping[orders.Letter, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
}

Least = Literal["one", "ranks", "stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``virtual``: the chunks that a rank may have; None: any number from 1 on. ``least``: the fewest microbatches.
    ``multiple_of_rounds``, ``multiple_of_ranks``: what else their number must be. ``splits``: it computes the gradients of
    weights apart from those of inputs."""

    name: str
    order: Callable[[int, orders.Shape], Iterator[orders.Step]]
    placement: Placement = "loop"
    virtual: int | None = 1
    least: Least = "one"
    multiple_of_rounds: bool = False
    multiple_of_ranks: bool = False
    splits: bool = False
    about: str = ""

    def least_microbatches(self, ranks: int, virtual: int) -> int:
        """
        >>> SCHEDULES["1f1b"].least_microbatches(4, 1), SCHEDULES["dualpipev"].least_microbatches(4, 2)
        (4, 8)
        """
        return {"one": 1, "ranks": ranks, "stages": ranks * virtual}[self.least]

    def multiple(self, ranks: int, virtual: int, microbatches: int) -> int:
        """The number of which the microbatches must be a multiple.

        >>> SCHEDULES["interleaved"].multiple(4, 2, 10), SCHEDULES["circular"].multiple(4, 2, 10)
        (2, 4)
        """
        if self.multiple_of_ranks and virtual > 1:
            return ranks
        return orders.rounds(ranks, microbatches) if self.multiple_of_rounds else 1

    def runs(self, ranks: int, virtual: int, microbatches: int) -> bool:
        """Whether it has a table for so many ranks, chunks of each, and microbatches."""
        return (
            self.virtual in (None, virtual)
            and microbatches >= self.least_microbatches(ranks, virtual)
            and microbatches % self.multiple(ranks, virtual, microbatches) == 0
        )


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="gpipe", order=orders.gpipe, about="all forward passes, then all backward passes"),
        Schedule(
            name="1f1b",
            order=orders.one_f_one_b,
            least="ranks",
            about="a backward pass after each forward pass, as soon as there is one",
        ),
        Schedule(
            name="interleaved",
            order=orders.interleaved,
            virtual=None,
            multiple_of_rounds=True,
            about="1f1b over several chunks of each rank: a smaller bubble, more transfers",
        ),
        Schedule(
            name="looped-bfs",
            order=orders.looped_bfs,
            virtual=None,
            about="gpipe over several chunks of each rank",
        ),
        Schedule(
            name="zero-bubble",
            order=orders.zero_bubble,
            virtual=None,
            multiple_of_rounds=True,
            splits=True,
            about="interleaved, with the gradients of weights where ranks would wait",
        ),
        Schedule(
            name="zbv",
            order=orders.zbv,
            placement="v",
            virtual=2,
            splits=True,
            about="two chunks in a V, with the gradients of weights where ranks would wait",
        ),
        Schedule(
            name="dualpipev",
            order=orders.dualpipev,
            placement="v",
            virtual=2,
            least="stages",
            splits=True,
            about="two chunks in a V, a forward pass of one beside a backward pass of the other",
        ),
        Schedule(
            name="circular",
            order=orders.circular,
            virtual=None,
            multiple_of_ranks=True,
            about="one program for all devices; a forward and a backward pass in each tick",
        ),
    )
}


assert tuple(SCHEDULES) == NAMES


def table_of(name: str, ranks: int, virtual: int, microbatches: int) -> Table:
    """The computations of each rank, without transfers (``transfers.py``). The schedule must run with these numbers."""
    schedule = SCHEDULES[name]
    assert schedule.runs(ranks, virtual, microbatches), (name, ranks, virtual, microbatches)
    latest_first = name == "looped-bfs"
    actions = [
        _numbered(
            schedule.order(rank, orders.Shape(ranks, virtual, microbatches)),
            stages_of(rank, ranks, virtual, schedule.placement),
            microbatches,
            latest_first=latest_first,
        )
        for rank in range(ranks)
    ]
    return Table(ranks=ranks, virtual=virtual, microbatches=microbatches, placement=schedule.placement, actions=actions)


def _numbered(
    steps: Iterable[orders.Step], stages: tuple[int, ...], microbatches: int, *, latest_first: bool
) -> list[Action]:
    """The steps with their microbatches, without those of microbatches that there are not. ``latest_first``: backward passes
    begin with the latest microbatch."""
    # How often each chunk had each letter. A backward pass is both halves, so that it counts as each.
    forward, inputs, weights = ([0] * len(stages) for _ in range(3))
    waiting: deque[tuple[int, int]] = deque()
    found: list[Action] = []
    for letter, chunk in steps:
        if letter == "F":
            assert chunk is not None
            number = forward[chunk]
            forward[chunk] += 1
        elif letter == "W":
            chunk, number = waiting.popleft() if chunk is None else (chunk, weights[chunk])
            weights[chunk] += 1
            if (chunk, number) in waiting:
                waiting.remove((chunk, number))
        else:
            assert chunk is not None
            number = inputs[chunk]
            inputs[chunk] += 1
            if letter == "I":
                waiting.append((chunk, number))
            else:
                weights[chunk] += 1
        if number < microbatches:
            microbatch = microbatches - 1 - number if latest_first and letter == "B" else number
            found.append(Action(stages[chunk], KINDS[letter], microbatch))
    return found
