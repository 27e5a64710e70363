"""GPUs of a node that no switch connects: a group sends over the links between its devices alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shardwright.cost import read_machine
from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.hardware.links import Group
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.cost.steps.rings import NO_STEPS
from tests.cost.plans import priced

MI300X = replace(Rates.of(chip_of("mi300x"), "used"), steps=NO_STEPS)


def sent_seconds(kind: str, size: int, inside: int, rates: Rates) -> float:
    time = time_of(kind, size, Group(inside=inside, domains=1), rates)
    assert time is not None
    return time.seconds - time.latency_s


@pytest.mark.parametrize(("inside", "links"), [(8, 7), (4, 3), (2, 1)])
def test_two_gpus_have_one_of_seven_links(inside: int, links: int) -> None:
    """By hand: seven links of an MI300X deliver 316 GB/s."""
    expected = 64e6 * (inside - 1) / inside / (316e9 * links / 7)
    assert sent_seconds("all-gather", 64_000_000, inside, MI300X) == pytest.approx(expected)
    assert sent_seconds("permute", 64_000_000, inside, MI300X) == pytest.approx(64e6 / (316e9 / 7))


def test_drawn_groups_take_as_long_as_the_busiest_link_between_two_devices() -> None:
    """The bytes of each link, counted one device after the other."""
    draw = random.Random(20261128)
    for _ in range(200):
        peers = draw.randint(1, 15)
        inside, size = draw.randint(2, peers + 1), draw.randint(1, 1 << 30)
        rates = replace(MI300X, linked_devices=peers)
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"):
            on_link: dict[tuple[int, int], float] = {}
            for source in range(inside):
                targets = (
                    [(source + 1) % inside] if kind == "permute" else [one for one in range(inside) if one != source]
                )
                for target in targets:
                    sent = size if kind == "permute" else size / inside * (2 if kind == "all-reduce" else 1)
                    on_link[source, target] = on_link.get((source, target), 0.0) + sent
            busiest = max(on_link.values()) / (rates.link_bytes_per_s / peers)
            assert sent_seconds(kind, size, inside, rates) == pytest.approx(busiest), (kind, peers, inside, size)
            # A switch gives a device all of its rate, whichever devices are in the group.
            assert sent_seconds(kind, size, inside, replace(rates, linked_devices=None)) <= busiest * (1 + 1e-9)


def test_a_file_says_that_a_node_has_no_switch(tmp_path) -> None:
    """Tensor parallelism over two of four GPUs that are connected directly takes longer than over two on a switch."""
    file = tmp_path / "four.toml"
    file.write_text('kind = "h200"\n[numbers]\nlinked_devices = 3\n', encoding="utf-8")
    assert read_machine(f"h200:4+{file}").numbers is not None
    plans = [
        priced("llama3-8b", "fsdp-tp", chips, mesh_sizes={"fsdp": 2, "tensor": 2}, batch=8, engine="torch")
        for chips in ("h200:4", f"h200:4+{file}")
    ]
    switched, direct = (plan.step for plan in plans)
    assert switched is not None
    assert direct is not None
    assert direct.exposed_seconds > 2 * switched.exposed_seconds
    file.write_text('kind = "h200"\n[numbers]\nlinked_devices = 2.5\n', encoding="utf-8")
    with pytest.raises(Exception, match="must be a whole number"):
        read_machine(f"h200:4+{file}")
