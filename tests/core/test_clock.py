"""A table on a clock: put in order once, then run with any seconds."""

from __future__ import annotations

import pytest

from shardwright.core.schedules import clock
from shardwright.core.schedules.actions import Action
from shardwright.core.schedules.clock import run, unit_seconds
from shardwright.core.stages.choice import timetable


def test_a_table_is_put_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan runs it a dozen times: with flops and seconds, and for each fix that is tried."""
    asked: list[Action] = []
    needed = clock._needed

    def counted(table, rank, action, *rest, **options):
        asked.append(action)
        return needed(table, rank, action, *rest, **options)

    monkeypatch.setattr(clock, "_needed", counted)
    table = timetable("interleaved", 4, 2, 16)
    slow = run(table, lambda action: 3 * unit_seconds(action))
    # A plan that is made for its memory needs no order.
    assert not asked
    assert slow.seconds > max(slow.busy)
    first = len(asked)
    assert first >= sum(len(actions) for actions in table.actions)
    assert run(table).seconds == pytest.approx(slow.seconds / 3)
    assert len(asked) == first


def test_what_a_rank_holds_at_most_is_by_weight_and_not_by_number() -> None:
    """Two stages of a rank: the first holds more microbatches, those of the second weigh more."""
    table = timetable("interleaved", 2, 2, 4)
    alike, heavy = run(table), run(table, held=lambda stage: 100 if stage >= 2 else 1)
    assert alike.most_live[0] >= heavy.most_live[0]
    assert heavy.live[0][2] == max(heavy.live[0][2], alike.live[0].get(2, 0))
    assert 100 * heavy.live[0][2] + heavy.live[0][0] >= 100 * alike.live[0].get(2, 0) + alike.live[0][0]


def test_ranks_with_equal_work_are_equally_busy() -> None:
    """Whatever the order of their actions: sums of floats depend on it."""
    found = run(timetable("interleaved", 8, 3, 24), lambda action: 0.1 * unit_seconds(action))
    assert len({*found.busy}) == 1
