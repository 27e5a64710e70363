"""What carries activations between layouts: the parts that devices end with are those of the whole array."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.core.findings.position import located
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.hops import WholeSlice
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.movement import steps
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.layer_io import index_of, size_of
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of, redistribute
from shardwright.engine_jax.lowering.shardings import partition_spec
from shardwright.models import build

MESH = Mesh.of(a=2, b=2, c=2)
IN_HOPS = WholeSlice(minor=2, gathers=4, scatters=4)
NAMES = ("x", "y", "z")


def any_spec(rng: random.Random) -> Spec:
    """Each axis cuts one dim or none, in any order of majors."""
    cuts: dict[str, list[str]] = {name: [] for name in NAMES}
    for axis in rng.sample(MESH.names, k=3):
        if name := rng.choice((*NAMES, None)):
            cuts[name].append(axis)
    return Spec.build(NAMES, cuts)


def on_slice(mesh: Mesh) -> Mesh:
    return Mesh(mesh.axes, IN_HOPS)


@pytest.mark.parametrize("mesh", [MESH, on_slice(MESH)], ids=["", "in hops"])
@pytest.mark.parametrize("seed", range(40))
def test_every_device_ends_with_its_part_of_the_sum(seed: int, mesh: Mesh) -> None:
    rng = random.Random(seed)
    before, after = any_spec(rng), any_spec(rng)
    summed = tuple(axis for axis in MESH.names if axis not in before.axes and rng.random() < 0.5)
    way = steps(before, after, summed, mesh)
    whole = np.random.default_rng(seed).integers(-99, 99, (8, 16, 8)).astype(np.float32)

    @partial(
        jax.shard_map,
        mesh=device_mesh(MESH),
        in_specs=partition_spec(before),
        out_specs=partition_spec(after),
        check_vma=False,
    )
    def moved(part):
        # What is yet to be summed is not in equal shares: 1 / n each would hide a device left out.
        share = index_of(summed) + 1 if summed else 1
        total = sum(range(1, size_of(summed) + 1))
        return redistribute(part * share, way, NAMES) / (total if summed else 1)

    with jax.default_device(jax.devices()[0]):
        result = jax.jit(moved)(whole)
    # out_specs without an axis show the first device's copy: look at every device's own.
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=f"{before} -> {after}: {way}")


def test_a_sum_that_is_not_made_is_seen() -> None:
    before, after = Spec.build(NAMES, {"x": "a"}), Spec.build(NAMES, {"y": "a"})
    assert [step.kind for step in steps(before, after, ["b"], MESH)] == ["all-reduce", "all-to-all"]
    assert [step.kind for step in steps(before, after, [], MESH)] == ["all-to-all"]


@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}])
def test_two_hops_over_a_whole_slice_are_the_same_as_one(sizes: dict[str, int]) -> None:
    axes = tuple(sizes)
    mesh = on_slice(Mesh(tuple(Axis(name=axis, size=size) for axis, size in sizes.items())))
    cut, whole = Spec.build(("x", "y"), {"x": axes}), Spec.build(("x", "y"), {})
    gather, scatter = steps(cut, whole, (), mesh), steps(whole, cut, axes, mesh)
    assert [step.kind for step in (*gather, *scatter)] == ["all-gather"] * 2 + ["reduce-scatter"] * 2
    array = np.random.default_rng(0).integers(-99, 99, (16, 4)).astype(np.float32)

    @partial(
        jax.shard_map,
        mesh=device_mesh(mesh),
        in_specs=partition_spec(cut),
        out_specs=(partition_spec(whole), partition_spec(cut)),
        check_vma=False,
    )
    def both(part):
        gathered = redistribute(part, gather, ("x", "y"))
        return gathered, redistribute(gathered * (index_of(axes) + 1), scatter, ("x", "y"))

    gathered, scattered = jax.jit(both)(array)
    for shard in gathered.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array)
    np.testing.assert_array_equal(scattered, array * 36)


@pytest.mark.parametrize(
    ("roles", "once"), [({"fsdp": "fsdp"}, True), ({"fsdp": {"elsewhere": "fsdp", "logits": "tensor"}}, False)]
)
def test_a_tied_embedding_is_brought_into_use_once_where_both_uses_are_alike(roles: dict[str, Any], once: bool) -> None:
    layout = read_layout(located({"name": "mine", "mesh": {"fsdp": 2}, "roles": roles}))
    table = build("llama3-test", {"num_layers": "1", "tied": "true"})
    plan = make_plan(Request(layout=layout, table=table, batch=4, length=16))
    assert links_of(plan, "cpu").tied_once is once
