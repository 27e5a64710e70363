"""The resharding of activations: each device ends with its shard of the full array."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.core.findings.position import located
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.hops import AUTO, WholeSlice
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.movement import reshard_steps
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.layer_io import index_of, size_of
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of, redistribute
from shardwright.engine_jax.lowering.shardings import partition_spec
from shardwright.models import build

MESH = Mesh.of(a=2, b=2, c=2)
IN_HOPS = WholeSlice(dims=(2, 2, 2), gathers=4, scatters=4).by("two")
NAMES = ("x", "y", "z")


def any_spec(rng: random.Random) -> Spec:
    """Each axis shards one dim or none, in any order of major and minor."""
    axes: dict[str, list[str]] = {name: [] for name in NAMES}
    for axis in rng.sample(MESH.names, k=3):
        if name := rng.choice((*NAMES, None)):
            axes[name].append(axis)
    return Spec.build(NAMES, axes)


def on_slice(mesh: Mesh) -> Mesh:
    return Mesh(mesh.axes, IN_HOPS)


@pytest.mark.parametrize("mesh", [MESH, on_slice(MESH)], ids=["", "in hops"])
@pytest.mark.parametrize("seed", range(40))
def test_every_device_ends_with_its_shard_of_the_sum(seed: int, mesh: Mesh) -> None:
    rng = random.Random(seed)
    before, after = any_spec(rng), any_spec(rng)
    summed = tuple(axis for axis in MESH.names if axis not in before.axes and rng.random() < 0.5)
    resharding = reshard_steps(before, after, summed, mesh)
    full = np.random.default_rng(seed).integers(-99, 99, (8, 16, 8)).astype(np.float32)

    @partial(
        jax.shard_map,
        mesh=device_mesh(MESH),
        in_specs=partition_spec(before),
        out_specs=partition_spec(after),
        check_vma=False,
    )
    def moved(shard):
        # The summands differ: equal ones, 1 / n each, would hide a missing device.
        factor = index_of(summed) + 1 if summed else 1
        total = sum(range(1, size_of(summed) + 1))
        return redistribute(shard * factor, resharding, NAMES) / (total if summed else 1)

    with jax.default_device(jax.devices()[0]):
        result = jax.jit(moved)(full)
    # With an axis that is not in out_specs, the result shows only the first device's copy: check every device.
    for shard in result.addressable_shards:
        message = f"{before} -> {after}: {resharding}"
        np.testing.assert_array_equal(np.asarray(shard.data), full[shard.index], err_msg=message)


def test_only_a_partial_array_is_summed() -> None:
    before, after = Spec.build(NAMES, {"x": "a"}), Spec.build(NAMES, {"y": "a"})
    assert [step.kind for step in reshard_steps(before, after, ["b"], MESH)] == ["all-reduce", "all-to-all"]
    assert [step.kind for step in reshard_steps(before, after, [], MESH)] == ["all-to-all"]


CUBE = WholeSlice(dims=(2, 2, 2), gathers=4, scatters=4)
CHIPS = WholeSlice(dims=(2, 2, 2), on_chip=2, gathers=4, scatters=4)
ROUTES = [(CUBE, route) for route in CUBE.routes(AUTO)] + [(CHIPS, route) for route in CHIPS.routes("chunks")]


@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}], ids=str)
def test_every_route_over_a_whole_slice_gives_the_same(sizes: dict[str, int]) -> None:
    """The second spec has the axes of one dim in another order than the mesh."""
    axes = tuple(sizes)
    plain = Mesh(tuple(Axis(name=axis, size=size) for axis, size in sizes.items()))
    steps, full = [], Spec.build(NAMES, {})
    for order in {axes, axes[::-1]}:
        sharded = Spec.build(NAMES, {"x": order})
        for whole, route in ROUTES:
            mesh = replace(plain, whole_slice=replace(whole, route=route))
            gather, scatter = reshard_steps(sharded, full, (), mesh), reshard_steps(full, sharded, axes, mesh)
            assert [step.kind for step in (*gather, *scatter)] == ["all-gather", "reduce-scatter"]
            assert (gather[0].hops is None) == (route == ()) or len(axes) > 1
            steps.append((sharded, gather, scatter))
    array = np.random.default_rng(0).integers(-99, 99, (16, 5, 2)).astype(np.float32)

    @partial(
        jax.shard_map,
        mesh=device_mesh(plain),
        in_specs=(tuple(partition_spec(sharded) for sharded, *_ in steps),),
        out_specs=[(partition_spec(full), partition_spec(sharded)) for sharded, *_ in steps],
        check_vma=False,
    )
    def all_of_them(shards):
        found = []
        for shard, (_, gather, scatter) in zip(shards, steps, strict=True):
            gathered = redistribute(shard, gather, NAMES)
            found.append((gathered, redistribute(gathered * (index_of(axes) + 1), scatter, NAMES)))
        return found

    for (gathered, scattered), (sharded, gather, _) in zip(
        jax.jit(all_of_them)((array,) * len(steps)), steps, strict=True
    ):
        for shard in gathered.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), array, err_msg=f"{sharded} {gather}")
        np.testing.assert_array_equal(scattered, array * 36, err_msg=f"{sharded} {gather}")


@pytest.mark.parametrize("shape", [(16,), (8,), (16, 2)], ids=str)
def test_a_shard_without_a_large_dim_is_divided_along_its_own(shape: tuple[int, ...]) -> None:
    names = NAMES[: len(shape)]
    mesh = replace(Mesh.of(a=8), whole_slice=replace(CUBE, route=CUBE.routes("chunks")[0]))
    sharded, full = Spec.build(names, {names[0]: ("a",)}), Spec.build(names, {})
    (gather,), (scatter,) = reshard_steps(sharded, full, (), mesh), reshard_steps(full, sharded, ("a",), mesh)
    array = np.random.default_rng(0).integers(-99, 99, shape).astype(np.float32)

    @partial(
        jax.shard_map,
        mesh=device_mesh(mesh),
        in_specs=partition_spec(sharded),
        out_specs=(partition_spec(full), partition_spec(sharded)),
        check_vma=False,
    )
    def both(shard):
        gathered = redistribute(shard, (gather,), names)
        return gathered, redistribute(gathered, (scatter,), names)

    gathered, scattered = jax.jit(both)(array)
    np.testing.assert_array_equal(gathered, array)
    np.testing.assert_array_equal(scattered, array * 8)


@pytest.mark.parametrize(
    ("roles", "once"), [({"fsdp": "fsdp"}, True), ({"fsdp": {"elsewhere": "fsdp", "logits": "tensor"}}, False)]
)
def test_a_tied_embedding_is_taken_into_use_once_where_both_uses_are_the_same(
    roles: dict[str, Any], once: bool
) -> None:
    layout = read_layout(located({"name": "mine", "mesh": {"fsdp": 2}, "roles": roles}))
    table = build("llama3-test", {"num_layers": "1", "tied": "true"})
    plan = make_plan(Request(layout=layout, table=table, batch=4, length=16))
    assert links_of(plan, "cpu").tied_once is once
