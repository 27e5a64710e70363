"""The lines of ``metrics.jsonl`` that an earlier run wrote: which stay when a run goes on, and what is wrong with any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a file holds for a run that goes on after some step, in bytes as they are there.

    ``kept``: the lines of the steps until then. ``later``: those of steps that are done again. ``damaged``: lines that are
    no record of a step, or of a later step among earlier ones, by their number from 1. ``cut_off``: a last line that
    was not written to its end, as a killed run leaves it; its step is done again.
    """

    kept: Sequence[bytes]
    later: Sequence[bytes]
    damaged: Sequence[tuple[int, bytes]]
    cut_off: bytes


def earlier_lines(data: bytes, first_step: int) -> Earlier:
    """Sorts the lines of a file for a run that goes on after ``first_step`` steps.

    >>> data = b'{"step": 1}\\n{"stxp": 2}\\n{"step": 3}\\n{"step": 4}\\n{"st'
    >>> found = earlier_lines(data, 3)
    >>> found.kept, found.later
    ([b'{"step": 1}\\n', b'{"step": 3}\\n'], [b'{"step": 4}\\n'])
    >>> found.damaged, found.cut_off
    ([(2, b'{"stxp": 2}\\n')], b'{"st')
    """
    *lines, last = data.split(b"\n")
    steps = [_step_of(line) for line in lines]
    # A last line that only lacks its end is as good as any; any other one is of a step after the line before it.
    if (step := _step_of(last)) is not None and step <= first_step:
        lines, steps, last = [*lines, last], [*steps, step], b""
    until = max((place for place, step in enumerate(steps, 1) if step is not None and step <= first_step), default=0)
    if last and until == len(lines) and max((step or 0 for step in steps), default=0) < first_step:
        lines, steps, last = [*lines, last], [*steps, None], b""
    whole = [line + b"\n" for line in lines]
    kept = [line for line, step in zip(whole, steps, strict=True) if step is not None and step <= first_step]
    later = [line for line, step in zip(whole[until:], steps[until:], strict=True) if step is not None]
    damaged = [
        (place, line)
        for place, (line, step) in enumerate(zip(whole, steps, strict=True), 1)
        if step is None or (step > first_step and place <= until)
    ]
    return Earlier(kept=kept, later=later, damaged=damaged, cut_off=last)


def _step_of(line: bytes) -> int | None:
    """The step that a line is the record of; None for what is no record."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if type(step) is int and step >= 1 else None
