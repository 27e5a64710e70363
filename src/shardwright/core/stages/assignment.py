"""Which units each stage has: contiguous runs of them, so that the largest stage is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

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


def balanced(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of units of each stage: the largest sum of a stage is the least possible, and among those assignments the sum of
    the squares is. Exact. Each stage has at least one unit; ``stages`` is at most the number of units.

    >>> balanced([0, 4, 4, 4, 4, 6], 3)
    (3, 2, 1)
    >>> balanced([1] * 7, 3)
    (3, 2, 2)
    """
    assert 1 <= stages <= len(work)
    sums = (0.0, *accumulate(work))
    most = _least_largest(work, sums, stages)

    @cache
    def best(first: int, left: int) -> tuple[float, int]:
        """The least sum of squares of the units from ``first`` on in ``left`` stages, and the end of the first of these."""
        if left == 1:
            rest = sums[-1] - sums[first]
            return (rest * rest if rest <= most else float("inf")), len(work)
        found = (float("inf"), first + 1)
        for end in range(first + 1, len(work) - left + 2):
            own = sums[end] - sums[first]
            if own > most:
                break
            squares = own * own + best(end, left - 1)[0]
            # Of equal ones the first stage is the longer, as layers are shared out everywhere.
            if squares <= found[0]:
                found = squares, end
        return found

    counts, first = [], 0
    for left in range(stages, 0, -1):
        end = best(first, left)[1]
        counts.append(end - first)
        first = end
    return tuple(counts)


def _least_largest(work: Sequence[float], sums: Sequence[float], stages: int) -> float:
    """The least bound under which the units fit into the stages. Only sums of runs can be that bound."""
    possible = sorted({sums[end] - sums[first] for first in range(len(work)) for end in range(first + 1, len(sums))})
    low, high = 0, len(possible) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(work, sums, stages, possible[middle]):
            high = middle
        else:
            low = middle + 1
    return possible[low]


def _fits(work: Sequence[float], sums: Sequence[float], stages: int, most: float) -> bool:
    used, first = 0, 0
    while first < len(work):
        end = first
        while end < len(work) and sums[end + 1] - sums[first] <= most:
            end += 1
        if end == first:
            return False
        first, used = end, used + 1
    return used <= stages


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
