"""What carries a load where every collective has one length: few collectives, and few bytes besides those that processes need."""

from __future__ import annotations

import pytest

from shardwright.checkpoint.exchange.collectives import AllToAlls, Permutes, carried_by, padded
from shardwright.checkpoint.exchange.rings import Relay, Steps
from shardwright.checkpoint.exchange.schedule import schedule_of
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from tests.checkpoint.test_schedule import stored_of

COUNT = 4096


def sent(rows: int, wanted: list[list[Box]], process: int = 77) -> tuple[int, int, int]:
    """The collectives of one process, the bytes that it sends in them, and those of its parcels. A row has 2 MiB."""
    boxes = [Box((row, 0), (row + 1, 1 << 19)) for row in range(rows)]
    wants = wants_of((one, box) for one, own in enumerate(wanted) for box in own)
    schedule = schedule_of(stored_of(boxes, 2, piece_bytes=1 << 20), wants, process, 5)
    collectives = num_bytes = of_parcels = 0
    for number in range(schedule.num_rounds):
        for move in schedule.round(number).moves:
            how = carried_by(move.steps, len(move.processes))
            collectives += how.num_collectives
            num_bytes += how.bytes_sent
            of_parcels += sum(parcel.num_bytes for parcel in move.send.parcels) if move.send else 0
    return collectives, num_bytes, of_parcels


def test_thousands_that_need_all_send_each_parcel_once() -> None:
    """Padded all-to-alls would be 512 rounds of 512 collectives, of 16 MiB each."""
    rows = [Box((0, 0), (COUNT, 1 << 19))]
    assert sent(COUNT, [rows] * COUNT) == (COUNT - 1, (COUNT - 1) << 21, (COUNT - 1) << 21)


def test_columns_of_rows_go_in_all_to_alls() -> None:
    """A parcel has 512 bytes: 4,095 permutes of almost nothing would take longer than what they send."""
    columns = [[Box((0, at), (COUNT, at + 128))] for at in range(0, 1 << 19, 128)]
    collectives, num_bytes, of_parcels = sent(COUNT, columns)
    assert collectives == 1
    assert num_bytes <= 8 * of_parcels


@pytest.mark.parametrize("count", [2, 3, 4, 16, 100, 4096])
@pytest.mark.parametrize("num_bytes", [1, 4096, 60_000, 1 << 20, 2_000_001, 8 << 20])
def test_no_choice_takes_longer_than_the_other(count: int, num_bytes: int) -> None:
    for steps in (
        Steps(0, 0, max(1, min(count - 1, (16 << 20) // num_bytes)), num_bytes),
        Relay(0, 1, max(1, min(count - 1, (16 << 20) // num_bytes)), num_bytes),
    ):
        found = carried_by(steps, count)
        exact = steps.num_hops * num_bytes
        if isinstance(found, Permutes):
            assert found.num_hops == steps.num_hops
            assert exact <= found.bytes_sent <= max(1.25 * exact, exact + steps.num_hops * 4096)
        else:
            assert found.length * found.num_collectives >= num_bytes
            assert found.length * count <= max(16 << 20, 4096 * count)
            # At most what the permutes would take, in bytes and in latency.
            assert found.bytes_sent + (found.num_collectives << 20) <= steps.num_hops * (padded(num_bytes) + (1 << 20))


def test_lengths_are_few_and_not_much_longer() -> None:
    lengths = {padded(number) for number in range(1, 1 << 24, 997)}
    assert len(lengths) < 50
    assert all(0 <= padded(number) - number < max(4096, number / 4) for number in range(1, 1 << 24, 997))
    assert carried_by(Steps(0, 0, 1, 100), 2) in (Permutes(1, 4096), AllToAlls(2, 4096, 1))
