"""A table on a clock: when it ends, who waits, and what a rank holds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from time import process_time

import pytest

from shardwright.core.schedules.actions import LETTERS, Action, Kind, Table, ends, needs
from shardwright.core.schedules.clock import SENDS, run, unit_seconds
from shardwright.core.schedules.schedules import SCHEDULES, table_of
from shardwright.core.stages.choice import timetable


def in_order_of_need(table: Table, lasts: Mapping[tuple[int, Kind], float]) -> float:
    """The end by the definition alone: each action ends after those that it needs and after the one before it on its rank."""
    actions = {
        (action, rank): place for rank, of_rank in enumerate(table.actions) for place, action in enumerate(of_rank)
    }
    by_end = {
        (kind, action.stage, action.microbatch): (action, rank)
        for action, rank in actions
        for kind in ends(action.kind)
    }

    @cache
    def end(action: Action, rank: int) -> float:
        place = actions[action, rank]
        begin = end(table.actions[rank][place - 1], rank) if place else 0.0
        for kind, stage in needs(action, table.num_stages):
            before, source = by_end[kind, stage, action.microbatch]
            transfer: Kind = "send" if kind == "forward" else "send_gradient"
            begin = max(begin, end(before, source) + (lasts[stage, transfer] if source != rank else 0.0))
        return begin + lasts[action.stage, action.kind]

    return max(end(of_rank[-1], rank) for rank, of_rank in enumerate(table.actions))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_end_is_that_of_the_longest_chain_of_computations_and_transfers(name: str) -> None:
    rng = random.Random(name)
    sizes = [(ranks, virtual, number) for ranks in (2, 3, 4) for virtual in (1, 2, 3) for number in range(1, 13)]
    of_it = [size for size in sizes if SCHEDULES[name].runs(*size)]
    for ranks, virtual, number in rng.sample(of_it, 4):
        table = table_of(name, ranks, virtual, number)
        lasts: dict[tuple[int, Kind], float] = {
            (stage, kind): rng.random() for stage in range(table.num_stages) for kind in LETTERS
        }
        found = run(table, lambda action, lasts=lasts: lasts[action.stage, action.kind])
        assert found.seconds == in_order_of_need(table, lasts)
        # Those of the timetable say the same of what is sent, and its computations are these.
        whole = timetable(name, ranks, virtual, number)
        assert run(whole, lambda action, lasts=lasts: lasts[action.stage, action.kind]).seconds == found.seconds
        for rank, of_rank in enumerate(whole.actions):
            for kind in SENDS:
                assert table.sends(rank, kind) == sum(action.kind == kind for action in of_rank)


def test_a_table_of_many_stages_and_microbatches_is_quick() -> None:
    """As many as published runs have: 128 stages on 16 ranks, 384 microbatches. Each part in seconds of this process."""
    began = process_time()
    table = table_of("interleaved", 16, 8, 384)
    made = process_time()
    found = run(table)
    assert found.seconds > max(found.busy)
    ended = process_time()
    # 0.12 and 0.25 on one core of a machine with nothing else to do.
    assert made - began < 1.5, made - began
    assert ended - made < 2.5, ended - made


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
