"""Capacity and traffic against tokens assigned one by one."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product
from math import ceil

from shardwright.core.model.capacity import Traffic, row_capacity


def test_capacity_is_the_even_share_times_the_factor_rounded_up() -> None:
    for factor, top_k, experts, length in product(("1", "1.25", "1.5", "2.75"), (1, 2, 3), (3, 8), (1, 7, 50, 64)):
        share = Fraction(factor) * top_k * length / experts
        # A float is exact for eighths and quarters, and for thirds that are integers.
        taken = row_capacity(float(factor), top_k=top_k, experts=experts, length=length)
        assert taken == min(length, ceil(share)), (factor, top_k, experts, length)
    assert row_capacity(1.25, top_k=2, experts=8, length=50) == 16  # 15.625


def kept(traffic: Traffic, senders_of_a_row: int, rows: int) -> int:
    """Assignments that one device's experts take from ``rows`` rows, each on ``senders_of_a_row`` devices, if all tokens are
    routed to them in turn: no other routing fills more slots."""
    chosen: Counter[tuple[int, int]] = Counter()
    for row in range(rows):
        place = 0
        for _ in range(senders_of_a_row * traffic.tokens):
            for _ in range(min(traffic.top_k, traffic.experts)):
                chosen[row, place % traffic.experts] += 1
                place += 1
    tokens = senders_of_a_row * traffic.tokens
    return sum(min(number, tokens if traffic.capacity is None else traffic.capacity) for number in chosen.values())


def test_the_most_received_is_reached_if_every_token_is_routed_to_one_devices_experts() -> None:
    cases = product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 5), (1, 2, 4), (1, 2, 4), (None, 1, 3, 4, 7, 30))
    held = shared = limited = 0
    for devices, experts, rows, tokens, row_shards, top_k, capacity in cases:
        if devices % row_shards:
            continue
        traffic = Traffic(
            devices=devices,
            experts=experts,
            rows=rows,
            tokens=tokens,
            row_shards=row_shards,
            top_k=top_k,
            capacity=capacity,
        )
        # A row on several devices is one row, so the group has fewer rows by that factor.
        assert traffic.most == kept(traffic, row_shards, devices // row_shards * rows), traffic
        # One sender has its own tokens of each of its rows, and cannot know how full an expert already is.
        assert traffic.to_one == kept(traffic, 1, rows), traffic
        assert traffic.buffer_rows(1.25) == min(traffic.most, ceil(Fraction("1.25") * rows * tokens * top_k)), traffic
        held += 1
        shared += row_shards > 1 and capacity is not None and traffic.most < devices * traffic.to_one
        limited += traffic.to_one < rows * tokens * min(top_k, experts)
    assert min(held // 10, shared, limited) > 50, (held, shared, limited)
