"""How a gather goes over an entire TPU slice: the ways, their prices from links and bytes, and which is chosen."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from shardwright.core.mesh.hops import AUTO, ONE, WAYS, WholeSlice, hops_of
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.layouts import load_layout
from shardwright.models import build


def priced(chips: str, mesh: dict[str, int], hops: str = AUTO, layout: str = "fsdp", model: str = "llama3-8b") -> Plan:
    machine = read_machine(chips)
    request = Request(
        layout=load_layout(layout),
        table=build(model, {"num_layers": "2"}),
        batch=machine.num_devices,
        length=2048,
        mesh_sizes=mesh,
        chip=machine.chip,
        hops=hops,
    )
    return price(make_plan(request), machine)


def prices(plan: Plan) -> dict[str, float]:
    (choice,) = plan.choices
    return dict(choice.seconds)


# In units of V / 2W, of the unsharded bytes and a ring: the sum of 1 / n / rings of each hop. An all-reduce takes a gather's time twice.
BY_HAND = {
    # Three rings. What is gathered first in the wrong order is rearranged: those have a copy on top.
    "v5p:4x4x8": {
        "one": 2 / 3,
        "two: z, then x y": 1 / 16 + 1 / 2,
        "two: y z, then x": 1 / 4 / 2 + 1,
    },
    # 16 chips of a dim are a ring on v6e. Two dims: the second hop of two has one ring, and an all-reduce has both.
    "v6e:16x16": {"one": 1, "two: y, then x": 1 / 16 + 1},
    # Two devices share the links of a chip, where a group has only one of them.
    "tpu7x:4x4x8": {
        "one": 2 / 3,
        "two: z chip, then x y": 1 / 16 + 2 / 2,
        "two: chip, then x y z": 2 / 3,
    },
}


@pytest.mark.parametrize("chips", BY_HAND)
def test_prices_follow_from_links_and_bytes(chips: str) -> None:
    devices = read_machine(chips).num_devices
    found, expected = prices(priced(chips, {"fsdp": devices})), BY_HAND[chips]
    for way, ratio in expected.items():
        # Latencies of small tensors, and on TPU7x the hop within a chip, are not in the sums above.
        assert found[way] / found["one"] == pytest.approx(ratio / expected["one"], rel=0.06), way


@pytest.mark.parametrize(
    ("chips", "chosen"),
    [("v5p:4x4x8", "two: z, then x y"), ("v6e:16x16", "one"), ("tpu7x:4x4x8", "two: x, then y z chip")],
)
def test_the_least_time_is_chosen_and_planned(chips: str, chosen: str) -> None:
    devices = read_machine(chips).num_devices
    plan = priced(chips, {"fsdp": devices})
    found = prices(plan)
    assert plan.choices[0].chosen == min(found, key=found.__getitem__) == chosen
    # Gathers and scatters over fewer devices than libtpu rewrites are not chosen of. All others take the route.
    sent = [one for one in plan.collectives if one.subgroup or one.compiled_as]
    assert sum(one.seconds or 0 for one in sent) == pytest.approx(found[chosen], rel=1e-9)
    assert all(one.compiled_as == "all-reduce" for one in sent) == (chosen == "one")


def test_a_way_that_is_asked_for_is_taken() -> None:
    plans = {way: priced("v5p:4x4x8", {"fsdp": 128}, way) for way in WAYS}
    chosen = {way: plan.choices[0].chosen for way, plan in plans.items()}
    assert chosen == {"one": "one", "two": "two: z, then x y", "chunks": "chunks"}
    # Each device sends the same bytes but in one collective, of which libtpu makes an all-reduce.
    sent = {way: plan.choices[0].wire_bytes[chosen[way]] for way, plan in plans.items()}
    assert sent["one"] == pytest.approx(2 * sent["two"], rel=1e-3)
    assert sent["chunks"] == pytest.approx(sent["two"], rel=1e-2)
    json = plans["chunks"].to_json()
    assert json["choices"][0]["what"] == "hops"  # pyright: ignore[reportIndexIssue]
    # On v5p a program waits for each hop: as long as one dim's links alone. On TPU7x they run at the same time.
    v5p, tpu7x = prices(priced("v5p:4x4x8", {"fsdp": 128})), prices(priced("tpu7x:4x4x8", {"fsdp": 256}))
    assert v5p["chunks"] / v5p["one"] > 1.5
    assert tpu7x["chunks"] / tpu7x["one"] < 1.5


def test_without_times_two_hops_send_the_fewest_bytes() -> None:
    machine = read_machine("v5p:4x4x8")
    request = priced("v5p:4x4x8", {"fsdp": 128}).request
    request = replace(request, chip=machine.chip)
    assert make_plan(request).mesh.whole_slice == replace(machine.chip.whole_slice, route=(((2,), (0, 1)),))  # pyright: ignore


def test_axes_that_divide_a_dim_have_a_hop_over_the_last_axis() -> None:
    whole = WholeSlice(dims=(4, 4, 8), route=(((2,), (0, 1)),))
    hops = hops_of(("fsdp", "expert"), {"fsdp": 64, "expert": 2}, 128, whole)
    assert hops is not None
    assert [hop.axes for hop in hops.chunks[0]] == [("expert",), ("fsdp",)]


@pytest.mark.parametrize(
    ("mesh", "chosen"),
    [({"fsdp": 64, "expert": 2}, "two: expert, then fsdp"), ({"fsdp": 16, "expert": 8}, "two: z, then x y")],
)
def test_hops_over_axes_are_named_by_them(mesh: dict[str, int], chosen: str) -> None:
    """64 x 2 divides the dims of 4 x 4 x 8 otherwise than by entire dims."""
    plan = priced("v5p:4x4x8", mesh, layout="ep-as-cp", model="mixtral-8x7b")
    assert plan.choices[-1].chosen == chosen
    hops = {one.axes for one in plan.collectives if one.kind == "all-gather" and len(one.axes) == 1}
    assert {("expert",), ("fsdp",)} <= hops


@pytest.mark.parametrize("dims", [(4, 4, 8), (2, 4), (8,)])
def test_a_chunk_has_every_dim_once(dims: tuple[int, ...]) -> None:
    whole = WholeSlice(dims=dims)
    assert whole.routes(AUTO)[0] == ONE
    for route in whole.routes(AUTO):
        for chunk in route:
            assert sorted(dim for hop in chunk for dim in hop) == list(range(len(dims)))
    for way in WAYS:
        assert len(whole.routes(way)) >= (1 if way == "one" or len(dims) > 1 else 0)


def test_bytes_of_hops_are_those_of_one() -> None:
    """(n - 1) / n of the unsharded bytes, whatever the route."""
    whole = WholeSlice(dims=(4, 4, 8))
    for route in whole.routes(AUTO)[1:]:
        hops = hops_of(("fsdp",), {"fsdp": 128}, 128 * 3000, replace(whole, route=route))
        assert hops is not None
        sizes = {hop: prod(hops.sizes[place] for place in hop.digits) for chunk in hops.chunks for hop in chunk}
        sent = sum(hop.elements * (size - 1) // size for hop, size in sizes.items())
        assert sent == pytest.approx(127 * 3000, rel=1e-4)
