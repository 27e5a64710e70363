"""Random numbers of an operand's shards are those of the operand on one device: which elements a device has, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.quantization.elements import Elements, Tiled, elements_of
from shardwright.core.quantization.quantized import QuantizedWeight, ShardedDim
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Dim, Operand, Product
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.layer_io import LowPrecision as JaxLow
from shardwright.engine_jax.io.layer_io import Site as JaxSite
from shardwright.engine_jax.precision.random_bits import random_numbers as on_jax
from shardwright.engine_torch.io.layer_io import LowPrecision, Site
from shardwright.engine_torch.precision.random_bits import random_numbers
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.core.quantized_by_hand import merged, shard_of

BATCH, LENGTH, SEED = 8, 64, 3**30
FORWARD: tuple[Product, Operand] = ("input_gradient", "output_gradient")
BACKWARD: tuple[Product, Operand] = ("weight_gradient", "output_gradient")
LAYOUTS = {
    "fsdp": ({"fsdp": 4}, 1, False),
    "fsdp, microbatches": ({"fsdp": 2}, 2, False),
    "fsdp-tp": ({"fsdp": 2, "tensor": 2}, 1, False),
    "cp": ({"fsdp": 2, "context": 2}, 1, False),
    "cp, head to tail": ({"fsdp": 2, "context": 2}, 1, True),
}


def planned(case: str) -> Plan:
    mesh, microbatches, balanced = LAYOUTS[case]
    request = Request(
        layout=load_layout(case.split(",")[0]),
        table=build("llama3-test"),
        batch=BATCH,
        length=LENGTH,
        microbatches=microbatches,
        mesh_sizes=mesh,
        load_balanced=balanced,
        engine="torch",
        precision=preset("nvfp4"),
    )
    return make_plan(request)


def rows_of(
    tokens: ShardedDim, mesh: Mesh, device: int, microbatch: int, num: int, chunks: tuple[int, ...]
) -> np.ndarray:
    """The rows and tokens of the global batch that a device has, in their order, as places in (rows, tokens)."""
    of_batch, of_length = tokens.sharding
    own = np.array(shard_of(BATCH, of_batch, mesh, device))[microbatch::num]
    in_order = np.arange(LENGTH).reshape(len(chunks), -1)[list(chunks)].ravel()
    positions = in_order[shard_of(LENGTH, of_length, mesh, device)]
    return (own[:, None] * LENGTH + positions).ravel()


def of_device(plan: Plan, weight: QuantizedWeight, device: int, microbatch: int, shape: tuple[int, ...], place):
    mesh, num = plan.mesh, plan.request.microbatches

    def here(axes: tuple[str, ...]) -> tuple[int, int]:
        index = 0
        for axis in axes:
            index = index * mesh.size(axis) + mesh.coordinates(device)[axis]
        return index, mesh.size(axes)

    low = LowPrecision(
        quantizers=plan.request.precision.quantizers,
        name=weight.name,
        site=Site(seed=SEED, step=5, microbatch=microbatch, layer=1),
        elements=elements_of(weight, mesh, plan.row_chunks, num),
        here=here,
    )
    return random_numbers(place, low, torch.empty(shape), 0).numpy()


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_shard_has_the_random_numbers_of_its_elements(case: str) -> None:
    plan = planned(case)
    alone = make_plan(replace(plan.request, layout=load_layout("fsdp"), mesh_sizes={"fsdp": 1}, microbatches=1))
    for weight, of_alone in zip(plan.quantized, alone.quantized, strict=True):
        if weight.name.split(".")[-1] not in ("q", "down", "up"):
            continue
        (operand,) = (one for one in weight.operands if (one.product, one.operand) == FORWARD)
        tokens, outputs = operand.dims["tokens"], operand.dims["outputs"]
        full = of_device(alone, of_alone, 0, 0, (BATCH * LENGTH, outputs.size), FORWARD)
        for device in range(plan.mesh.num_devices):
            for microbatch in range(plan.request.microbatches):
                rows = rows_of(tokens, plan.mesh, device, microbatch, plan.request.microbatches, plan.row_chunks)
                only_first = (outputs.size,), (outputs.axes,)
                columns = merged(*only_first, plan.mesh, device)
                ours = of_device(plan, weight, device, microbatch, (len(rows), len(columns)), FORWARD)
                np.testing.assert_array_equal(ours, full[np.ix_(rows, columns)])


def test_random_numbers_are_uniform_and_differ_by_what_they_are_of() -> None:
    """Step, layer, seed, product and weight: at most as many are equal as of any numbers."""
    plan = planned("fsdp")
    weight = plan.quantized[0]
    shape = (BATCH * LENGTH, prod(weight.operands[2].dims["outputs"].sizes))
    low = LowPrecision(quantizers=plan.request.precision.quantizers, name=weight.name, site=Site(seed=1))
    x = torch.empty(shape)
    kinds = [
        random_numbers(FORWARD, replace(low, **changed), x, 0).numpy().ravel()
        for changed in (
            {},
            {"site": Site(seed=2)},
            {"site": Site(seed=1 + 2**40)},
            {"site": Site(seed=1, step=1)},
            {"site": Site(seed=1, layer=0)},
            {"name": "another"},
        )
    ]
    kinds.append(random_numbers(BACKWARD, low, x.T, 0).T.ravel().numpy())
    for number, one in enumerate(kinds):
        counts = np.bincount(one >> 20, minlength=16)
        # Six standard deviations of the count of one of 16 equal parts.
        assert np.abs(counts - one.size / 16).max() < 6 * np.sqrt(one.size / 16)
        for other in kinds[:number]:
            assert (one == other).mean() < 1e-4


@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
def test_both_engines_draw_the_same_numbers(place: tuple[Product, Operand]) -> None:
    """Rows of 50 tokens are filled up to 64 for a transform; an odd number of columns has no pairs."""
    dims: Mapping[Dim, tuple[Tiled, ...]] = {
        "tokens": (Tiled(size=4, axes=(), tiles=(0,)), Tiled(size=50, axes=(), tiles=(0, 1))),
        "outputs": (Tiled(size=7, axes=(), tiles=(0,)), Tiled(size=5, axes=(), tiles=(0,))),
    }
    elements, quantizers = {place: Elements(dims=dims)}, preset("nvfp4").quantizers
    shape = (4 * 50, 35) if place == FORWARD else (35, 4, 64)
    low = LowPrecision(quantizers=quantizers, name="w", site=Site(seed=SEED, step=2, layer=7), elements=elements)
    ours = random_numbers(place, low, torch.empty(shape), 0)
    words = (jnp.uint32(SEED % 2**32), jnp.uint32(SEED >> 32))
    site = JaxSite(seed=words, step=jnp.int32(2), microbatch=jnp.int32(0), layer=jnp.int32(7), factors={})
    theirs = jax.jit(
        lambda site: on_jax(place, JaxLow(quantizers=quantizers, name="w", elements=elements), site, shape)
    )(site)
    assert ours is not None
    np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs))
