"""What changed options do to the next step, as lines to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwright.core.findings.bounds import is_number
from shardwright.core.findings.escaped import escaped
from shardwright.training.changes import CHANGEABLE, Change, Effect
from shardwright.training.optimizer import OptimizerOptions, learning_rate

MOST = 10**15
"""The largest number of a manifest with which a learning rate is computed."""


def effects(
    changes: Sequence[Change],
    named: Sequence[str],
    after: Mapping[str, Any],
    schedule: OptimizerOptions,
    *,
    step: int,
    first_row: int,
) -> Iterator[str]:
    """A line for each name: what changes, and what the next step does. ``step``: steps done; ``first_row``: of the next step."""
    next_step, by_name = step + 1, {change.name: change for change in changes}
    switched = {
        change.name.replace("-", "_"): change.was for change in changes if change.name in ("lr", "warmup", "steps")
    }
    rate = f"the learning rate of step {next_step:,} is {learning_rate(schedule, step):.6g}"
    # What a manifest says may be anything.
    if all(is_number(value) and 0 <= value <= MOST for value in switched.values()):
        rate += f", and would have been {learning_rate(replace(schedule, **switched), step):.6g}"
    rows = f"step {next_step:,} reads rows {first_row:,} to {first_row + after['batch'] - 1:,}"
    what: Mapping[Effect, str] = {
        "rate": rate,
        "update": f"from step {next_step:,} on",
        "average": f"from step {next_step:,} on{_of_average(by_name.get('average'), step)}",
        "batch": rows,
        "rows": f"rows begin again: {rows}",
    }
    for name in named:
        if name in by_name:
            change = by_name[name]
            yield f"{name}: was {_shown(name, change.was)}, is {_shown(name, change.now)}; {what[CHANGEABLE[name].effect]}"
        else:
            yield f"{name}: is {_shown(name, after[CHANGEABLE[name].key])} as before, so --change {name} changes nothing"


def _of_average(change: Change | None, step: int) -> str:
    if change is None or (change.was is not None and change.now is not None):
        return ""
    if change.now is None:
        return ", and the next checkpoint has none"
    return f", beginning with the weights of step {step:,}"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    return escaped(f"the text {str(value)[:8]}" if name == "data" else f"{value}")
