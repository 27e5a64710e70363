"""The bound of the chance that a device receives more than a buffer holds, against the exact distribution of drawn groups of devices."""

from __future__ import annotations

from math import comb, log
from random import Random

import numpy as np
import pytest

from shardwright.core.model.capacity import Traffic


def chance_of_more(traffic: Traffic, rows: int) -> float:
    """That one device receives more: each token has so many of its experts as a draw without replacement has, and tokens are independent."""
    experts, own, chosen = traffic.devices * traffic.experts, traffic.experts, traffic.top_k
    of_token = [comb(own, n) * comb(experts - own, chosen - n) / comb(experts, chosen) for n in range(chosen + 1)]
    received = np.ones(1)
    for _ in range(traffic.devices * traffic.rows * traffic.tokens):
        received = np.convolve(received, of_token)
    return float(received[rows + 1 :].sum())


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_above_the_exact_chance_and_near_it(seed: int) -> None:
    draw = Random(seed)
    devices, experts, top_k = draw.choice([(2, 1, 1), (4, 1, 1), (4, 2, 2), (8, 1, 2), (2, 4, 4)])
    traffic = Traffic(
        devices=devices, experts=experts, rows=1, tokens=draw.randint(8, 48), row_shards=1, top_k=top_k, capacity=None
    )
    for shares in (1.0, 1.1, 1.25, 1.5):
        rows = int(shares * traffic.assignments)
        exact, bound = chance_of_more(traffic, rows), traffic.log_chance_of_more(rows)
        assert bound <= 0
        if exact > 1e-12:
            assert bound >= log(exact) - 1e-9
            if top_k == 1:
                assert bound <= log(exact) + log(devices) + log(devices * traffic.assignments)
