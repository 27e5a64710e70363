"""The order in which a rank of each schedule computes.

An order is a sequence of letters with a chunk each: F forward, B backward, I and W the halves of a backward pass. The microbatches follow
from it by counting: the first F of a chunk is that of microbatch 0, the second of 1. A W without a chunk is that of the oldest I
that has none yet.

| schedule | source |
|---|---|
| ``gpipe`` | arXiv:1811.06965 |
| ``1f1b`` | PipeDream-Flush, arXiv:2006.09503 |
| ``interleaved`` | Megatron-LM, arXiv:2104.04473; microbatches in rounds, as in arXiv:2407.21783, 3.3.2 |
| ``looped-bfs`` | arXiv:2211.05953 |
| ``zero-bubble`` | ZB-H1 of arXiv:2401.10241, interleaved |
| ``zbv`` | arXiv:2401.10241, 6 |
| ``dualpipev`` | DualPipe of DeepSeek-V3, arXiv:2412.19437, folded into a V |
| ``circular`` | one program for all devices: in each tick a device computes a forward and a backward pass of one chunk |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Letter = Literal["F", "B", "I", "W"]


class Shape(NamedTuple):
    """Ranks, chunks of each, and microbatches of a step."""

    ranks: int
    virtual: int
    microbatches: int


Step = tuple[Letter, int | None]
"""What is computed, and of which chunk of the rank."""


def gpipe(_: int, of: Shape) -> Iterator[Step]:
    yield from _times(of.microbatches, ("F", 0))
    yield from _times(of.microbatches, ("B", 0))


def looped_bfs(_: int, of: Shape) -> Iterator[Step]:
    for chunk in range(of.virtual):
        yield from _times(of.microbatches, ("F", chunk))
    for chunk in reversed(range(of.virtual)):
        yield from _times(of.microbatches, ("B", chunk))


def one_f_one_b(rank: int, of: Shape) -> Iterator[Step]:
    ahead = min(of.ranks - 1 - rank, of.microbatches)
    yield from _times(ahead, ("F", 0))
    for _ in range(of.microbatches - ahead):
        yield "F", 0
        yield "B", 0
    yield from _times(ahead, ("B", 0))


def interleaved(rank: int, of: Shape) -> Iterator[Step]:
    """A forward takes two slots to come back from each rank behind this one."""
    forwards = list(_in_rounds(of))
    ahead = _ahead(forwards, rank, of, slots_of_a_hop=2)
    yield from _each("F", forwards[:ahead])
    backwards = iter([of.virtual - 1 - chunk for chunk in forwards])
    for chunk in forwards[ahead:]:
        yield "F", chunk
        yield "B", next(backwards)
    yield from _each("B", backwards)


def zero_bubble(rank: int, of: Shape) -> Iterator[Step]:
    """Gradients of weights wait: for as many backward passes as ranks are before this one, so that those get theirs early."""
    forwards = list(_in_rounds(of))
    ahead = _ahead(forwards, rank, of, slots_of_a_hop=1)
    yield from _each("F", forwards[:ahead])
    for number, chunk in enumerate(forwards):
        if ahead + number < len(forwards):
            yield "F", forwards[ahead + number]
        yield "I", of.virtual - 1 - chunk
        if number >= rank:
            yield "W", None
    yield from _times(min(rank, len(forwards)), ("W", None))


def zbv(rank: int, of: Shape) -> Iterator[Step]:
    """At least as many microbatches as fill the V; ``numbered`` leaves out those that a step does not have."""
    filling = max(of.microbatches, 2 * of.ranks - 1)
    behind = of.ranks - rank
    yield from _times(2 * behind - 1, ("F", 0))
    yield from _times(rank, ("F", 1), ("F", 0))
    yield from _times(behind, ("F", 1), ("I", 1), ("W", 1))
    begun = 2 * behind - 1 + rank
    for number in range(filling - of.ranks):
        if begun + number < filling:
            yield "F", 0
        yield from _times(1, ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    yield from _times(rank, ("I", 0), ("I", 1))
    yield from _times(behind, ("I", 0), ("W", 0))
    yield from _times(rank, ("W", 1))
    yield from _times(rank, ("W", 0))


def dualpipev(rank: int, of: Shape) -> Iterator[Step]:
    """A forward of one chunk goes with a backward of the other, so that the transfers of each hide behind the other."""
    behind = of.ranks - 1 - rank
    yield from _times(2 * behind, ("F", 0))
    yield from _times(rank + 1, ("F", 0), ("F", 1))
    yield from _times(behind, ("I", 1), ("W", None), ("F", 1))
    yield from _times(of.microbatches - 2 * of.ranks + rank + 1, ("F", 0), ("B", 1), ("F", 1), ("B", 0))
    yield from _times(behind, ("B", 1), ("F", 1), ("B", 0))
    # From the middle on the gradients of weights wait, and fill the end.
    last = [chunk for _ in range(rank + 1) for chunk in (1, 0)]
    entire = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    yield from _each("B", last[:entire])
    yield from _each("I", last[entire:])
    yield from _times(behind, ("W", None), (("B" if entire >= len(last) else "I"), 0))
    yield from _times(rank + 1, ("W", None))


def circular(rank: int, of: Shape) -> Iterator[Step]:
    """Item k is forward on this rank in tick k + rank, backward in the tick that is as far behind the last rank's."""
    forwards = list(_in_groups(of))
    first_backward = (of.virtual - 1) * of.ranks + 2 * (of.ranks - 1) - rank
    for tick in range(len(forwards) + first_backward + 1):
        if 0 <= tick - rank < len(forwards):
            yield "F", forwards[tick - rank]
        if 0 <= tick - first_backward < len(forwards):
            yield "B", of.virtual - 1 - forwards[tick - first_backward]


def _times(number: int, *steps: Step) -> Iterator[Step]:
    for _ in range(number):
        yield from steps


def _each(letter: Letter, chunks: Iterable[int]) -> Iterator[Step]:
    for chunk in chunks:
        yield letter, chunk


def rounds(ranks: int, microbatches: int) -> int:
    """Rounds of the interleaved schedules: as many microbatches each, at least as many as ranks where there are so many.

    >>> rounds(4, 10), rounds(4, 3)
    (2, 1)
    """
    return max(1, microbatches // ranks)


def _in_rounds(of: Shape) -> Iterator[int]:
    """The chunk of each forward pass: in each round, all microbatches of a chunk before those of the next."""
    number = rounds(of.ranks, of.microbatches)
    for _ in range(number):
        for chunk in range(of.virtual):
            yield from [chunk] * (of.microbatches // number)


def _in_groups(of: Shape) -> Iterator[int]:
    """As rounds, of one microbatch for each rank."""
    for first in range(0, of.microbatches, of.ranks):
        for chunk in range(of.virtual):
            yield from [chunk] * min(of.ranks, of.microbatches - first)


def _ahead(forwards: list[int], rank: int, of: Shape, *, slots_of_a_hop: int) -> int:
    """Forward passes of a rank before its first backward."""
    of_a_round = of.microbatches // rounds(of.ranks, of.microbatches)
    return min((of.virtual - 1) * of_a_round + slots_of_a_hop * (of.ranks - 1 - rank), len(forwards))
