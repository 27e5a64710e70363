"""Which units each stage has: contiguous runs of them, so that the largest stage is as small as it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from shardwright.core.stages.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``layers``: numbers in the model. ``embedding`` and ``logits``: whether it has these ends too."""

    layers: range
    embedding: bool = False
    logits: bool = False

    @property
    def letters(self) -> str:
        """
        >>> Stage(layers=range(0, 3), embedding=True).letters
        'Ettt'
        """
        return "E" * self.embedding + "t" * len(self.layers) + "L" * self.logits


Fits = Callable[[int, int, int], bool]
"""``fits(stage, first, end)``: whether a stage can have the units from ``first`` up to ``end``."""


def balanced(work: Sequence[int], stages: int, fits: Fits | None = None) -> tuple[int, ...] | None:
    """The number of units of each stage: the largest sum of a stage is the least possible, and among those assignments the sum of
    the squares is. Exact. Each stage has at least one unit; ``stages`` is at most the number of units.

    ``fits``: whether a stage can have the units from one on, up to another. None where no assignment fits.

    >>> balanced([0, 4, 4, 4, 4, 6], 3)
    (3, 2, 1)
    >>> balanced([1] * 7, 3), balanced([1] * 7, 3, lambda stage, first, end: stage > 0 or end < 2)
    ((3, 2, 2), (1, 3, 3))
    """
    assert 1 <= stages <= len(work)
    # Of whole numbers all sums are exact.
    sums = (0, *accumulate(work))

    def ends(first: int, stage: int) -> Iterator[int]:
        """The possible ends of a stage that begins with a unit. The stages behind it have at least one unit each."""
        left = stages - 1 - stage
        possible = range(first + 1, len(work) - left + 1) if left else (len(work),)
        return (end for end in possible if fits is None or fits(stage, first, end))

    @cache
    def least(first: int, stage: int) -> float:
        """The least largest sum of the stages from one on."""
        if stage == stages:
            return 0
        found = inf
        for end in ends(first, stage):
            own = sums[end] - sums[first]
            if own >= found:
                break
            found = min(found, max(own, least(end, stage + 1)))
        return found

    most = _least_largest(sums, stages) if fits is None else least(0, 0)
    if most == inf:
        return None
    needed = _needed(sums, most)

    @cache
    def best(first: int, stage: int) -> tuple[float, int]:
        """The least sum of squares of the stages from one on, and the end of that stage."""
        if stage == stages:
            return 0, first
        found = (inf, first + 1)
        for end in ends(first, stage):
            own = sums[end] - sums[first]
            if own > most:
                break
            if needed[end] >= stages - stage:
                continue
            squares = own * own + best(end, stage + 1)[0]
            # Of equal ones the first stage is the longer, as layers are shared out everywhere.
            if squares <= found[0]:
                found = squares, end
        return found

    counts, first = [], 0
    for stage in range(stages):
        end = best(first, stage)[1]
        counts.append(end - first)
        first = end
    return tuple(counts)


def _least_largest(sums: Sequence[int], stages: int) -> int:
    """The least possible largest sum of so many stages. ``sums``: of the units before each, whole numbers."""
    low, high = max(after - before for before, after in pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _needed(sums, middle)[0] <= stages else (middle + 1, high)
    return low


def _needed(sums: Sequence[int], most: float) -> Sequence[int]:
    """How many stages of at most this sum the units from each one on need, where each unit is at most that."""
    needed, end = [0] * len(sums), len(sums) - 1
    for first in range(len(sums) - 2, -1, -1):
        while sums[end] - sums[first] > most:
            end -= 1
        needed[first] = 1 + needed[end]
    return needed


def assigned(units: Sequence[Unit], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages with so many units each, in order."""
    assert sum(counts) == len(units)
    stages, first = [], 0
    for count in counts:
        own = units[first : first + count]
        layers = [unit.layer for unit in own if unit.layer is not None]
        stages.append(
            Stage(
                layers=range(layers[0], layers[-1] + 1) if layers else range(0),
                embedding=any(unit.letter == "E" for unit in own),
                logits=any(unit.letter == "L" for unit in own),
            )
        )
        first += count
    return tuple(stages)
