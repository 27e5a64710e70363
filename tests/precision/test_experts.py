"""Grouped products of quantized operands: both engines alike, and rows on several devices as on one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

from shardwright.core.recipes.presets import preset
from shardwright.engine_jax.experts.grouped_low import quantized_grouped_product as on_jax
from shardwright.engine_jax.io.layer_io import LowPrecision as JaxLow
from shardwright.engine_torch.io.layer_io import LowPrecision as TorchLow
from shardwright.engine_torch.precision.products import quantized_grouped_product as on_torch
from tests.precision.made import ordinary

SIZES = (37, 0, 70, 5)
"""Rows of each expert: none, and parts of blocks."""

SPARE, INPUTS, OUTPUTS, BLOCK = 16, 96, 64, 8


def made(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, a matrix of each expert and cotangents."""
    return ordinary(0, (rows, INPUTS)), ordinary(1, (len(SIZES), INPUTS, OUTPUTS)), ordinary(2, (rows, OUTPUTS))


def of_jax(low: JaxLow, rows: np.ndarray, matrices: np.ndarray, cotangent: np.ndarray, sizes: np.ndarray):
    def product(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return on_jax(rows, matrices, sizes, BLOCK, low, {})

    out, pull = jax.vjp(product, rows, matrices)
    return out, *pull(cotangent)


@pytest.mark.parametrize("name", ["fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_both_engines_are_alike(name: str) -> None:
    """Rows of no expert come last on JAX, and are not a number."""
    num = sum(SIZES)
    rows, matrices, cotangent = made(num + SPARE)
    rows[num:], cotangent[num:] = np.nan, np.nan
    quantizers = preset(name).quantizers
    compiled = jax.jit(partial(of_jax, JaxLow(quantizers=quantizers)))
    out, d_rows, d_matrices = (np.asarray(one) for one in compiled(rows, matrices, cotangent, jnp.asarray(SIZES)))

    x = torch.from_numpy(rows[:num].copy()).requires_grad_()
    weight = torch.from_numpy(matrices.swapaxes(1, 2).copy()).requires_grad_()
    y = on_torch(x, weight, SIZES, TorchLow(quantizers=quantizers), {})
    y.backward(torch.from_numpy(cotangent[:num].copy()))
    assert x.grad is not None
    assert weight.grad is not None
    for ours, theirs in (
        (out[:num], y.detach().numpy()),
        (d_rows[:num], x.grad.numpy()),
        (d_matrices, weight.grad.numpy().swapaxes(1, 2)),
    ):
        # Of a sum, not of its largest term: rows have very different sizes.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
        assert np.abs(ours - theirs).mean() < 1e-6 * np.abs(theirs).mean()
    assert not d_matrices[SIZES.index(0)].any()


@pytest.mark.parametrize("name", ["fp8-current", "mxfp8"])
def test_no_array_has_a_scale_for_each_element(name: str) -> None:
    """Each would be the size of a buffer in float32."""
    num = sum(SIZES) + SPARE
    low = JaxLow(quantizers=preset(name).quantizers)
    text = jax.jit(partial(of_jax, low)).lower(*made(num), jnp.asarray(SIZES)).as_text()
    assert f"tensor<{num}x{INPUTS}xf32>" in text
    assert f"tensor<{num}x{INPUTS}x1x" not in text


def test_devices_with_other_rows_of_an_expert_agree() -> None:
    """The amax of an expert's rows is that of the rows of all devices, however many each of them has."""
    of_device = np.array([[20, 0, 40, 1], [17, 0, 30, 4]])
    per_device = 64
    rows, matrices, cotangent = made(sum(SIZES))
    ends = np.cumsum(SIZES)
    parts = [[], []]
    for expert, end in enumerate(ends):
        start = end - SIZES[expert]
        middle = start + of_device[0][expert]
        parts[0] += range(start, middle)
        parts[1] += range(middle, end)
    places = np.concatenate([[*part, *[-1] * (per_device - len(part))] for part in parts])
    quantizers = preset("fp8-current").quantizers
    axes = {place: ("a",) for place in quantizers if place[1] != "weight"}
    spec, whole = PartitionSpec("a"), PartitionSpec()

    def on_device(rows, matrices, cotangent, sizes):
        out, d_rows, d_matrices = of_jax(low, rows, matrices, cotangent, sizes[0])
        return out, d_rows, jax.lax.psum(d_matrices, "a")

    low = JaxLow(quantizers=quantizers, amax_axes=axes)
    sharded = jax.shard_map(
        on_device,
        mesh=Mesh(np.array(jax.devices()[:2]), ("a",)),
        in_specs=(spec, whole, spec, spec),
        out_specs=(spec, spec, whole),
        check_vma=False,
    )
    ours = jax.jit(sharded)(rows[places], matrices, cotangent[places], of_device)
    theirs = of_jax(JaxLow(quantizers=quantizers), rows, matrices, cotangent, jnp.asarray(SIZES))
    has = places >= 0
    for our, their in zip((*(np.asarray(one)[has] for one in ours[:2]), ours[2]), theirs, strict=True):
        their = np.asarray(their)
        their = their if their.ndim == 3 else their[places[has]]
        assert np.abs(np.asarray(our) - their).mean() < 1e-6 * np.abs(their).mean()
