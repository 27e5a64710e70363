"""The rules by which a run keeps its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.core.findings.bounds import is_integer, is_number, shown_number
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints are kept: those that any of the rules keeps. Without any rule, all are.

    ``newest``: so many of the latest steps; at least the newest one is always kept. ``every_steps``: the steps that are
    multiples of this number. ``every_hours``: of each period of so many hours the first step. Periods are those since
    1970-01-01 00:00 UTC, so 24 means days. ``best``: so many steps with the lowest value of the metric ``best_of``.

    Raises InputError for a number below 1.
    """

    newest: int | None = None
    every_steps: int | None = None
    every_hours: int | None = None
    best: int | None = None
    best_of: str = LOSS

    def __post_init__(self) -> None:
        counted = {
            "newest": (self.newest, "checkpoints"),
            "every_steps": (self.every_steps, "steps"),
            "every_hours": (self.every_hours, "hours"),
            "best": (self.best, "checkpoints"),
        }
        for name, (number, noun) in counted.items():
            if number is not None and (not is_integer(number) or number < 1):
                what = f"{noun} to keep" if name == "newest" else f"{noun} in the rule '{name}'"
                raise InputError(f"found {shown_number(number)} {what}, needed at least 1. Leave it out to keep all.")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule, so that nothing is deleted."""
        return self.newest is None and self.every_steps is None and self.every_hours is None and self.best is None

    def to_json(self) -> dict[str, Any]:
        """The rules that are set; an empty mapping if all checkpoints are kept."""
        values: dict[str, Any] = {
            "newest": self.newest,
            "every_steps": self.every_steps,
            "every_hours": self.every_hours,
            "best": self.best,
            "best_of": None if self.best is None else self.best_of,
        }
        return {name: value for name, value in values.items() if value is not None}


KEEP_ALL = Retention()

Keep = Retention | int | None
"""What a save takes: rules, the number of the newest checkpoints to keep, or None to keep all."""


def rules_of(keep: Keep, metrics: Mapping[str, float]) -> Retention:
    """The rules of a save, which has these metrics.

    Raises InputError for a number below 1, for a metric that is not a finite number, and for a rule about a metric that
    the save does not have.
    """
    rules = keep if isinstance(keep, Retention) else Retention(newest=keep)
    for name, value in metrics.items():
        if not is_number(value) or not math.isfinite(value):
            raise InputError(f"the metric '{name}' is {value!r}, and must be a finite number. Leave it out.")
    if rules.best is not None and rules.best_of not in metrics:
        known = did_you_mean(rules.best_of, metrics) if metrics else "It has none."
        raise InputError(
            f"the best {rules.best} of '{rules.best_of}' are to be kept, and this save has no such metric. {known} Give it "
            f"with metrics={{'{rules.best_of}': ...}}."
        )
    return rules
