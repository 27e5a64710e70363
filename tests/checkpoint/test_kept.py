"""Which steps the rules keep: against sets computed in another way, over long runs with bad clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from shardwright.checkpoint.retention.kept import SavedPoint, kept
from shardwright.checkpoint.retention.rules import Retention, rules_of
from shardwright.core.findings.errors import InputError

START = datetime(2026, 3, 1, 8, 15, 42, tzinfo=UTC)


def history(random: Random, number: int) -> list[SavedPoint]:
    """Steps of a run whose clock is often set back, and once far ahead; some manifests have no time or no loss."""
    clock, step, points = START, 0, []
    for _ in range(number):
        step += random.choice((1, 5, 5, 10, 25))
        clock += timedelta(minutes=random.choice((-200, -1, 0, 7, 40, 40, 90)))
        if random.random() < 0.02:
            clock += timedelta(days=30_000)
        points.append(
            SavedPoint(
                step=step,
                saved_at=None if random.random() < 0.05 else clock,
                # Few values, so that some are equal.
                metrics={} if random.random() < 0.05 else {"loss": random.randint(1, 30) / 4, "grad_norm": 1.0},
            )
        )
    return points


def expected(points: list[SavedPoint], rules: Retention) -> set[int]:
    """The same rules, as sets over all steps that were ever saved."""
    steps = [point.step for point in points]
    found = {steps[-1]} if rules.newest is None else set(steps[-rules.newest :])
    if rules.every_steps:
        found |= set(range(0, steps[-1] + 1, rules.every_steps)) & set(steps)
    if rules.every_hours:
        for point in points:
            if point.saved_at is None:
                found.add(point.step)
            else:
                period = (point.saved_at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(hours=rules.every_hours)
                begins = datetime(1970, 1, 1, tzinfo=UTC) + period * timedelta(hours=rules.every_hours)
                ends = begins + timedelta(hours=rules.every_hours)
                within = [one.step for one in points if one.saved_at is not None and begins <= one.saved_at < ends]
                found.add(min(within))
    if rules.best:
        found |= {point.step for point in points if not point.metrics}
        for point in points:
            better = [
                one
                for one in points
                if one.metrics
                and point.metrics
                and (one.metrics["loss"], one.step) < (point.metrics["loss"], point.step)
            ]
            if point.metrics and len(better) < rules.best:
                found.add(point.step)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_deleting_after_each_save_leaves_what_the_rules_say_of_all_steps(seed: int) -> None:
    random = Random(seed)
    rules = Retention(
        newest=random.choice((None, 1, 3)),
        every_steps=random.choice((None, 10, 50)),
        every_hours=random.choice((None, 1, 6, 24)),
        best=random.choice((1, None, 3)) if seed else 2,
    )
    points, there = history(random, 60), []
    for number, point in enumerate(points, 1):
        there.append(point)
        steps = kept(there, rules)
        there = [one for one in there if one.step in steps or rules.keeps_all]
        needed = {one.step for one in points[:number]} if rules.keeps_all else expected(points[:number], rules)
        assert {one.step for one in there} == needed, (rules, point)
        assert list(steps) == sorted(steps, reverse=True)


def test_every_rule_that_keeps_a_step_is_named() -> None:
    points = [SavedPoint(step=step, saved_at=START, metrics={"loss": 10.0 - step}) for step in (0, 2, 4)]
    points.append(SavedPoint(step=5))
    assert kept(points, Retention(newest=2, every_steps=2, every_hours=3, best=2)) == {
        5: ("newest 2", "time unknown", "loss unknown"),
        4: ("newest 2", "every 2 steps", "lowest 2 of loss"),
        2: ("every 2 steps", "lowest 2 of loss"),
        0: ("every 2 steps", "first of 3 hours"),
    }


def test_without_rules_every_step_is_kept_by_none() -> None:
    assert kept([SavedPoint(step=3), SavedPoint(step=7)], Retention()) == {7: (), 3: ()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"newest": 0}, "found 0 checkpoints to keep, needed at least 1. Leave it out to keep all."),
        ({"every_steps": -1}, "found -1 steps in the rule 'every_steps', needed at least 1. Leave it out to keep all."),
        ({"every_hours": 0.5}, "found 0.5 hours in the rule 'every_hours', needed at least 1. Leave it out to keep all."),
        ({"best": True}, "found True checkpoints in the rule 'best', needed at least 1. Leave it out to keep all."),
    ],
)  # fmt: skip
def test_a_rule_that_keeps_nothing(values: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Retention(**values)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({}, "the best 2 of 'loss' are to be kept, and this save has no such metric. It has none. Give it with "
             "metrics={'loss': ...}."),
        ({"los": 1.0}, "the best 2 of 'loss' are to be kept, and this save has no such metric. Did you mean 'los'? Give it "
                       "with metrics={'loss': ...}."),
        ({"loss": float("nan")}, "the metric 'loss' is nan, and must be a finite number. Leave it out."),
        ({"loss": "1"}, "the metric 'loss' is '1', and must be a finite number. Leave it out."),
    ],
)  # fmt: skip
def test_metrics_that_no_rule_can_use(metrics: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as caught:
        rules_of(Retention(best=2), metrics)
    assert str(caught.value) == message
