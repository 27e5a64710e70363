"""The lines of ``metrics.jsonl`` from an earlier run: which of them a resumed run keeps, and which are damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The lines of a file, for a run that goes on after some step, as unchanged bytes.

    ``kept``: the lines of the steps until then. ``later``: those of steps that are done again. ``damaged``: lines that are
    not the record of a step, or whose step is not between those around it, by their number from 1. ``incomplete``: a last
    line that was not written to its end, as a killed run leaves it; its step is done again.
    """

    kept: Sequence[bytes]
    later: Sequence[bytes]
    damaged: Sequence[tuple[int, bytes]]
    incomplete: bytes


def earlier_lines(data: bytes, first_step: int) -> Earlier:
    """Sorts the lines of a file for a run that goes on after ``first_step`` steps.

    >>> data = b'{"step": 1}\\n{"stxp": 2}\\n{"step": 3}\\n{"step": 4}\\n{"st'
    >>> found = earlier_lines(data, 3)
    >>> found.kept, found.later
    ([b'{"step": 1}\\n', b'{"step": 3}\\n'], [b'{"step": 4}\\n'])
    >>> found.damaged, found.incomplete
    ([(2, b'{"stxp": 2}\\n')], b'{"st')
    """
    *lines, last = data.split(b"\n")
    steps = [_step_of(line) for line in lines]
    # A last line that lacks only its newline is valid. Any other last line is of a step after the line before it.
    if (step := _step_of(last)) is not None and step <= first_step:
        lines, steps, last = [*lines, last], [*steps, step], b""
    steps = _ascending(steps)
    until = max((place for place, step in enumerate(steps, 1) if step is not None and step <= first_step), default=0)
    if (place := _read_wrong(steps, until, first_step)) is not None:
        steps[place - 1] = None
    if last and until == len(lines) and max((step or 0 for step in steps), default=0) < first_step:
        lines, steps, last = [*lines, last], [*steps, None], b""
    complete = [line + b"\n" for line in lines]
    return Earlier(
        kept=[line for line, step in zip(complete[:until], steps[:until], strict=True) if step is not None],
        later=[line for line, step in zip(complete[until:], steps[until:], strict=True) if step is not None],
        damaged=[
            (place, line) for place, (line, step) in enumerate(zip(complete, steps, strict=True), 1) if step is None
        ],
        incomplete=last,
    )


def _ascending(steps: Sequence[int | None]) -> list[int | None]:
    """The longest ascending subsequence of the steps, with None in place of the others.

    Among subsequences of equal length, it takes the one in which more steps differ from the one before by as much as their
    line numbers. A run writes a line for every step, so of two lines of one step the one at its expected place is right.

    >>> _ascending([1, 2, 1, 4, 5]), _ascending([1, 2, 4, 4, 5])
    ([1, 2, None, 4, 5], [1, 2, None, 4, 5])
    """
    # Before all lines: step 0, after which a run begins.
    found = [(0, 0), *((place, step) for place, step in enumerate(steps, 1) if step is not None)]
    if all(before[1] < after[1] for before, after in pairwise(found)):
        return list(steps)
    heights = {step: height for height, step in enumerate(sorted({step for _, step in found}))}
    lowest = _Best(len(heights))
    # For each line the best subsequence that ends with it: its length, how many of its steps are at their expected
    # distance, and the number of the line before it.
    rows: list[_Row] = []
    at_distance: dict[int, _Row] = {}
    for number, (place, step) in enumerate(found):
        near = at_distance.get(step - place, _NONE)
        row = max(_longer(lowest.below(heights[step]), 0), _longer(near, 1))
        rows.append(row)
        here = (row[0], row[1], number)
        lowest.put(heights[step], here)
        at_distance[step - place] = max(near, here)
    kept: list[int | None] = [None] * len(steps)
    number = max((*row[:2], number) for number, row in enumerate(rows))[2]
    while number > 0:
        place, step = found[number]
        kept[place - 1] = step
        number = rows[number][2]
    return kept


_Row = tuple[int, int, int]
_NONE: _Row = (0, 0, -1)


def _longer(row: _Row, as_far: int) -> _Row:
    return row[0] + 1, row[1] + as_far, row[2]


class _Best:
    """The largest row among those at a lower height, in logarithmic time (a Fenwick tree of maxima)."""

    def __init__(self, heights: int) -> None:
        self._rows = [_NONE] * (heights + 1)

    def put(self, height: int, row: _Row) -> None:
        height += 1
        while height < len(self._rows):
            self._rows[height] = max(self._rows[height], row)
            height += height & -height

    def below(self, height: int) -> _Row:
        found = _NONE
        while height > 0:
            found = max(found, self._rows[height])
            height -= height & -height
        return found


def _read_wrong(steps: Sequence[int | None], until: int, first_step: int) -> int | None:
    """The place of a single line that has a later step, but is where the line of one of the first steps belongs."""
    later = [(place, step) for place, step in enumerate(steps[until:], until + 1) if step is not None]
    if len(later) != 1:
        return None
    ((place, _),) = later
    last = (steps[until - 1] if until else 0) or 0
    return place if last + place - until <= first_step else None


def _step_of(line: bytes) -> int | None:
    """The step whose record a line is; None if the line is no record."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if type(step) is int and step >= 1 else None
