"""Gathers, scatters and sums on a switch: latency of each step, and a share of the shorter of inside and outside."""

from __future__ import annotations

from random import Random

import pytest

from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.hardware.links import Group
from shardwright.cost.steps.collectives import Rates, time_of
from tests.cost.plans import priced

H100 = Rates.of(chip_of("h100"), "used")
US = 1e-6


def seconds(kind: str, size: float, inside: int, domains: int = 1, rates: Rates = H100) -> float:
    time = time_of(kind, round(size), Group(inside=inside, domains=domains), rates)
    assert time is not None
    return time.seconds


@pytest.mark.parametrize(
    ("size", "inside", "domains", "low", "high"),
    [
        # nccl-tests over 32 nodes of 8 H100 (autoparallel #474): 1.1 to 1.7 ms of 134 MB.
        (134e6, 8, 32, 1.1e-3, 1.7e-3),
        # 1 GB over a node: 30 us and 394 GB/s of all bytes; How To Scale Your Model has 1.5 ms of 537 MB.
        (1e9, 8, 1, 2.2e-3, 2.8e-3),
        (537e6, 8, 1, 1.2e-3, 1.6e-3),
        # A ring over 32 nodes of one GPU each: NCCL's tuning has 442 us.
        (64e3, 1, 32, 90e-6, 200e-6),
    ],
)
def test_gathers_take_what_was_measured(size: float, inside: int, domains: int, low: float, high: float) -> None:
    assert low < seconds("all-gather", size, inside, domains) < high


def test_latency_of_a_ring_by_hand() -> None:
    """256 GPUs: 224 steps in nodes, 31 between them."""
    large = 1e11
    time = time_of("all-gather", int(large), Group(inside=8, domains=32), H100)
    assert time is not None
    assert time.latency_s == pytest.approx((8.4 + 224 * 3.4 + 31 * 14) * US)
    # A tree adds a step for each doubling of the nodes.
    sums = [time_of("all-reduce", int(large), Group(inside=8, domains=domains), H100) for domains in (2, 4, 32)]
    latencies = [one.latency_s for one in sums if one is not None]
    assert latencies[1] - latencies[0] == pytest.approx(28 * US)
    assert latencies[2] - latencies[1] == pytest.approx(3 * 28 * US)


def test_drawn_collectives_never_get_faster_with_more_bytes_or_more_domains() -> None:
    random = Random(20261128)
    for _ in range(300):
        kind = random.choice(["all-gather", "reduce-scatter", "all-reduce"])
        rates = Rates.of(chip_of(random.choice(["h100", "b200", "gb200", "a100", "mi300x", "h800"])), "used")
        inside, domains = random.choice([1, 2, 4, 8]), random.choice([1, 2, 4, 16, 64])
        size = 10 ** random.uniform(3, 10)
        if inside * domains == 1:
            continue
        time = seconds(kind, size, inside, domains, rates)
        assert seconds(kind, 1.5 * size, inside, domains, rates) >= 0.999 * time
        assert seconds(kind, size, inside, 2 * domains, rates) >= 0.999 * time


def test_a_step_over_more_nodes_is_longer() -> None:
    """FSDP of 8B, two rows a device, over 8 and 256 H100."""
    steps = []
    for nodes in (1, 32):
        plan = priced(
            "llama3-8b", "fsdp", f"h100:{nodes}x8", mesh_sizes={"fsdp": 8 * nodes}, batch=16 * nodes, length=4096
        )
        assert plan.step is not None
        steps.append(plan.step.communication_seconds)
    assert steps[1] > 2 * steps[0]


def test_what_fully_shard_gathers_is_behind_all_of_a_layer() -> None:
    """By hand: nothing of a layer's gathers is exposed where they are shorter than attention and feed-forward layer together."""
    plan = priced("llama3-8b", "fsdp", "h100:12x8", engine="torch", mesh_sizes={"fsdp": 96}, batch=192, length=2048)
    assert plan.step is not None
    layers = [one for one in plan.collectives if one.phase == "forward" and "layers" in one.tensors[0]]
    assert sum(one.seconds or 0.0 for one in layers) > 0
    of_ends = sum(one.seconds or 0.0 for one in plan.collectives if one not in layers and one.phase == "forward")
    assert plan.step.exposed_seconds <= 3 * of_ends


def test_what_was_measured_beyond_a_step_on_8_gpus_counts_for_8() -> None:
    """On B200 a step within a domain took 9.2 us in groups of 8; over 64 the other steps are NCCL's, and never faster in more domains."""
    rates = Rates.of(chip_of("b200"), "used")
    node, eight, whole = (
        time_of("all-gather", 10**11, Group(inside=inside, domains=domains), rates)
        for inside, domains in ((8, 1), (8, 8), (64, 1))
    )
    assert node is not None
    assert eight is not None
    assert whole is not None
    assert eight.latency_s == pytest.approx((23.1 + 56 * 3.4 + 7 * 5.8 + 7 * 14) * US)
    assert node.latency_s < whole.latency_s < eight.latency_s
