"""The ticks of one program for all stages, against a ring of ranks that pass on what they computed."""

from __future__ import annotations

import pytest

from shardwright.core.schedules.schedules import SCHEDULES, table_of
from shardwright.core.schedules.ticks import Ticks, Turn, ticks_in, ticks_of

CASES = [
    (ranks, virtual, microbatches)
    for ranks in (2, 3, 4, 8)
    for virtual in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 6, 8, 12, 16)
    if SCHEDULES["circular"].runs(ranks, virtual, microbatches)
]

Passed = tuple[int, int] | None
"""The stage that computed what a rank passes on, and the microbatch."""


def run(ticks: Ticks, ranks: int, virtual: int, microbatches: int) -> None:
    """Each rank computes with what its neighbour passed on in the tick before, and with the inputs in its slots."""
    outputs: list[Passed] = [None] * ranks
    cotangents: list[Passed] = [None] * ranks
    slots: list[dict[int, Passed]] = [{} for _ in range(ranks)]
    done: set[tuple[str, int, int]] = set()
    for tick in range(len(ticks)):
        sent: list[Passed] = [None] * ranks
        sent_back: list[Passed] = [None] * ranks
        for rank in range(ranks):
            turn = ticks.forward[rank][tick]
            if turn.active:
                stage = rank + ranks * turn.chunk
                assert stage == 0 or outputs[rank - 1] == (stage - 1, turn.microbatch), (tick, rank)
                assert turn.slot < ticks.slots
                assert turn.slot not in slots[rank]
                slots[rank][turn.slot] = sent[rank] = stage, turn.microbatch
                done.add(("forward", stage, turn.microbatch))
            back = ticks.backward[rank][tick]
            if back.active:
                stage = rank + ranks * back.chunk
                # The last stage computes its loss from the output of the same tick.
                behind = sent[rank] if stage == ranks * virtual - 1 else cotangents[(rank + 1) % ranks]
                assert behind == (min(stage + 1, ranks * virtual - 1), back.microbatch), (tick, rank)
                assert slots[rank].pop(back.slot) == (stage, back.microbatch), (tick, rank)
                sent_back[rank] = stage, back.microbatch
                done.add(("backward", stage, back.microbatch))
        outputs, cotangents = sent, sent_back
    assert len(done) == 2 * ranks * virtual * microbatches
    assert not any(slots)


def test_what_arrives_is_what_is_computed_with_next():
    for ranks, virtual, microbatches in CASES:
        ticks = ticks_of(table_of("circular", ranks, virtual, microbatches))
        assert len(ticks) == ticks_in(ranks, virtual, microbatches)
        run(ticks, ranks, virtual, microbatches)
        # Live microbatches of the first rank, of one stage each: never more than two for each stage.
        assert ticks.slots == min(virtual * ranks + ranks - 1, virtual * microbatches) < 2 * ranks * virtual


@pytest.mark.parametrize("what", ["slot", "microbatch", "chunk", "active"])
def test_a_fault_in_the_ticks_is_found(what: str):
    ticks = ticks_of(table_of("circular", 2, 2, 4))
    for rank, turns in enumerate(ticks.backward):
        for tick, turn in enumerate(turns):
            if turn.active:
                other = turn._replace(**{what: 1 - getattr(turn, what) if what != "active" else False})
                backward = [list(row) for row in ticks.backward]
                backward[rank][tick] = Turn(*other)
                with pytest.raises((AssertionError, KeyError)):
                    run(Ticks(forward=ticks.forward, backward=backward, slots=ticks.slots), 2, 2, 4)
