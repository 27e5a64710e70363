"""How each collective of JAX numbers devices for axes in another order than the mesh's, compared with arrays sliced by hand.

All collectives number devices in the order of their axes, as ``axis_index`` does. Only a permute numbers them in mesh order,
which is why there is one function that permutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardwright.core.mesh.hops import Hop, Hops, SubGroup
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.movement import ReshardStep
from shardwright.engine_jax.io import redistribute
from shardwright.engine_jax.io.layer_io import Ring, index_of, size_of

MESHES = ({"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 4})
ORDERS = [(sizes, axes) for sizes in MESHES for num in range(1, len(sizes) + 1) for axes in permutations(sizes, num)]
"""Every set of axes in every order. With three axes, or axes of different sizes, an order differs from its inverse."""

HELD = np.arange(8.0 * 8).reshape(8, 8, 1).astype(np.float32)
"""The array of each of 8 devices."""

Named = Mapping[str, np.ndarray]


def groups_of(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """The groups of devices over the axes, major first, made by moving NumPy's axes."""
    devices = np.arange(8).reshape(list(sizes.values()))
    moved = np.moveaxis(devices, [list(sizes).index(axis) for axis in axes], range(len(axes)))
    num = int(np.prod([sizes[axis] for axis in axes]))
    return moved.reshape(num, -1).T.tolist()


def by_hand(groups: Sequence[Sequence[int]]) -> Named:
    """The result on each device."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for group in groups:
        num, held = len(group), [HELD[device] for device in group]
        total, each = np.sum(held, axis=0), 8 // len(group)
        for index, device in enumerate(group):
            mine = slice(index * each, (index + 1) * each)
            one = {
                "index": np.float32(index),
                "passed on": held[index - 1],
                "passed on, cotangent": held[(index + 1) % num],
                "gathered": np.concatenate(held),
                "stacked": np.stack([array[0] for array in held]),
                "scattered": total[mine],
                "exchanged": np.concatenate([array[mine] for array in held], axis=1),
                "chunks": np.stack([array[index] for array in held]),
                "largest": np.max(held, axis=0),
                "summed": total,
            }
            for name, array in one.items():
                found.setdefault(name, {})[device] = array
    return {name: np.stack([by_device[device] for device in range(8)]) for name, by_device in found.items()}


def by_jax(sizes: Mapping[str, int], axes: tuple[str, ...]) -> Named:
    ring = Ring.over(Mesh.of(**sizes), axes)

    def all_of(own_18: jax.Array) -> dict[str, jax.Array]:
        own, step = own_18[0], ReshardStep(kind="all-gather", axes=axes)
        passed_on, cotangent = jax.vjp(lambda array: redistribute.passed_on(array, ring), own)
        found = {
            "index": jnp.float32(index_of(axes)),
            "passed on": passed_on,
            "passed on, cotangent": cotangent(own)[0],
            "gathered": redistribute.gathered(own, step, 0),
            "stacked": jax.lax.all_gather(own[0], axes),
            "scattered": redistribute.scattered(own, step, 0),
            "exchanged": jax.lax.all_to_all(own, axes, 0, 1, tiled=True),
            "chunks": jax.lax.all_to_all(own[: size_of(axes)], axes, 0, 0),
            "largest": jax.lax.pmax(own, axes),
            "summed": jax.lax.psum(own, axes),
        }
        return {name: array[None] for name, array in found.items()}

    return on_devices(all_of, sizes)(HELD)


def on_devices(function: Callable[[jax.Array], object], sizes: Mapping[str, int]) -> jax.stages.Wrapped:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    every = PartitionSpec(tuple(sizes))
    program = jax.shard_map(function, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    return jax.jit(program)


@pytest.mark.parametrize(("sizes", "axes"), ORDERS, ids=lambda value: " ".join(value))
def test_every_collective_counts_devices_in_the_order_of_its_axes(sizes: dict[str, int], axes: tuple[str, ...]) -> None:
    expected, found = by_hand(groups_of(sizes, axes)), by_jax(sizes, axes)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("axes", [("b", "c", "a"), ("c", "b"), ("a", "c")], ids=" ".join)
def test_a_ragged_exchange_has_groups_in_that_order_too(axes: tuple[str, ...]) -> None:
    """No CPU can run a ragged exchange: this tests the groups in the lowered program."""
    num, sizes = 2 ** len(axes), MESHES[0]

    def exchanged(own_18: jax.Array) -> jax.Array:
        one = jnp.ones(num, jnp.int32)
        offsets_and_sizes = (jnp.arange(num, dtype=jnp.int32), one, one * index_of(axes), one)
        return jax.lax.ragged_all_to_all(own_18[0], jnp.zeros_like(own_18[0]), *offsets_and_sizes, axis_name=axes)[None]

    text = on_devices(exchanged, sizes).trace(HELD).lower(lowering_platforms=("tpu",)).as_text()
    (written,) = re.findall(r"ragged_all_to_all.*?replica_groups = dense<(\[\[.*?\]\])>", text, re.DOTALL)
    assert sorted(eval(written)) == sorted(groups_of(sizes, axes))


@pytest.mark.parametrize("over", [0, 1])
def test_a_hop_takes_a_subgroup_of_an_axis(over: int) -> None:
    sizes, subgroup = {"b": 2, "a": 4}, SubGroup(sizes=(2, 2), over=(over,))
    hop = Hop(("a",), subgroup, (0,), 0)
    step = ReshardStep(kind="all-gather", axes=("a",), hops=Hops((2,), ((hop,),)))
    groups = [[base + place for place in group] for base in (0, 4) for group in subgroup.groups]
    expected = by_hand(groups)

    def both(own_18: jax.Array) -> tuple[jax.Array, jax.Array]:
        return redistribute.gathered(own_18[0], step, 0)[None], redistribute.scattered(own_18[0], step, 0)[None]

    gathered, scattered = on_devices(both, sizes)(HELD)
    np.testing.assert_array_equal(gathered, expected["gathered"])
    np.testing.assert_array_equal(scattered, expected["scattered"])
