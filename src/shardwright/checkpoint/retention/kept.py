"""Which steps the rules keep, and why: a pure function of what the manifests say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from shardwright.checkpoint.retention.rules import Retention

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPoint:
    """What the rules look at: a step, when it was saved (UTC; None if its manifest does not say), and its metrics."""

    step: int
    saved_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def kept(points: Iterable[SavedPoint], rules: Retention) -> dict[int, tuple[str, ...]]:
    """The steps that are kept, newest first, each with the rules that keep it. Without rules every step is kept by none.

    A step without what a rule looks at, its time or its metric, is kept: nothing says that it may be deleted. Of equal values
    of a metric the earlier step is the better one, so that a later one does not replace it. Time is compared only within one
    period, whose lowest step is kept: so a clock that is set back or far ahead never makes the rule keep fewer steps.

    >>> hourly = [SavedPoint(step=s, saved_at=datetime(2026, 3, 1, s // 4, 15 * (s % 4))) for s in range(1, 8)]
    >>> kept(hourly, Retention(newest=2, every_hours=1, every_steps=5))
    {7: ('newest 2',), 6: ('newest 2',), 5: ('every 5 steps',), 4: ('first of 1 hour',), 1: ('first of 1 hour',)}
    >>> losses = [SavedPoint(step=step, metrics={"loss": loss}) for step, loss in ((1, 3.0), (2, 1.5), (3, 2.0))]
    >>> kept(losses, Retention(best=1))
    {3: ('newest',), 2: ('lowest loss',)}
    """
    ordered = sorted(points, key=lambda point: -point.step)
    reasons: dict[int, list[str]] = {point.step: [] for point in ordered}
    if rules.keeps_all:
        return dict.fromkeys(reasons, ())
    newest = rules.newest or 1
    for point in ordered[:newest]:
        reasons[point.step].append("newest" if newest == 1 else f"newest {newest:,}")
    if (every := rules.every_steps) is not None:
        for point in ordered:
            if point.step % every == 0:
                reasons[point.step].append("every step" if every == 1 else f"every {every:,} steps")
    if rules.every_hours is not None:
        _keep_by_time(ordered, rules.every_hours, reasons)
    if rules.best is not None:
        _keep_best(ordered, rules.best, rules.best_of, reasons)
    return {step: tuple(found) for step, found in reasons.items() if found}


def _keep_by_time(ordered: list[SavedPoint], hours: int, reasons: dict[int, list[str]]) -> None:
    first: dict[int, int] = {}
    for point in ordered:
        if point.saved_at is None:
            reasons[point.step].append("time unknown")
        else:
            # Lower steps come later, and replace the higher ones of their period.
            first[int(point.saved_at.timestamp() // (hours * SECONDS_PER_HOUR))] = point.step
    for step in first.values():
        reasons[step].append("first of 1 hour" if hours == 1 else f"first of {hours:,} hours")


def _keep_best(ordered: list[SavedPoint], number: int, metric: str, reasons: dict[int, list[str]]) -> None:
    known = [point for point in ordered if metric in point.metrics]
    for point in ordered:
        if metric not in point.metrics:
            reasons[point.step].append(f"{metric} unknown")
    for point in sorted(known, key=lambda point: (point.metrics[metric], point.step))[:number]:
        reasons[point.step].append(f"lowest {metric}" if number == 1 else f"lowest {number:,} of {metric}")
