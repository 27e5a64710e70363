"""Copies around the collectives of ``fully_shard``."""

from __future__ import annotations

import random

import pytest

from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.steps.copies import with_copies
from tests.cost.plans import plan_of

CHIP = chip_of("h100")
RATE = 2.85e12 * CHIP.kernels_share()
"""Of a large copy, and what a step reaches of it."""


def copied_bytes(plan, shares=None) -> float:
    return RATE * sum(with_copies({}, plan, CHIP, "used", shares).values())


def test_the_bytes_of_llama_by_hand() -> None:
    """8B over 8 devices, everything recomputed: each layer is gathered twice and its gradients are reduced once, in float32."""
    plan = plan_of("llama3-8b", "fsdp", devices=8, batch=8, engine="torch", remat="full")
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336
    ends = 2 * 128_256 * 4096
    by_hand = 32 * layer * (2 * (2 + 2) + 2 + 4) + ends * ((2 + 2) + 2 + 4)
    assert copied_bytes(plan) == pytest.approx(by_hand, rel=1e-3)


def test_jax_has_no_such_copies_and_a_single_device_has_none() -> None:
    assert copied_bytes(plan_of("llama3-8b", "fsdp", devices=8, batch=8, engine="jax")) == 0
    assert copied_bytes(plan_of("llama3-8b", "fsdp", devices=1, batch=8, engine="torch")) == 0


def test_drawn_shares_count_each_collective_as_often_as_it_runs() -> None:
    """What a stage gathers once for all microbatches is copied once."""
    plan = plan_of("llama3-8b", "fsdp", devices=8, batch=16, microbatches=2, engine="torch", remat="full")
    draw = random.Random(7)
    for _ in range(20):
        shares = [draw.choice((0.0, 0.25, 0.5, 1.0)) for _ in plan.collectives]
        each = [
            copied_bytes(plan, [share if number == position else 0.0 for number in range(len(shares))])
            for position, share in enumerate(shares)
        ]
        assert copied_bytes(plan, shares) == pytest.approx(sum(each))
    assert copied_bytes(plan, [0.5] * len(plan.collectives)) == pytest.approx(copied_bytes(plan) / 2)
