"""Shards of an operand whose devices agree on an amax have the bytes of the unsharded operand, on simulated devices of JAX."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import PER_TENSOR, Quantizer
from shardwright.engine_jax.precision.operands import quantized
from tests.precision.made import ordinary

SHAPE = (32, 256)
CURRENT, ROW = preset("fp8-current"), preset("fp8-row")
MICRO, FOUR = preset("mxfp8"), preset("nvfp4")
CASES = {
    "per tensor, of both dims": (CURRENT.quantizers["output", "weight"], ("a", "b"), ("a", "b")),
    "per tensor, of gradients": (CURRENT.quantizers["input_gradient", "output_gradient"], ("a", "b"), ("a", "b")),
    "per row, of the contracted dim": (ROW.quantizers["output", "input"], (None, ("a", "b")), ("a", "b")),
    "per row, of both dims": (ROW.quantizers["output", "input"], ("a", "b"), ("b",)),
    "1 x 32, nobody agrees": (MICRO.quantizers["output", "input"], ("a", "b"), ()),
    "16 x 16 and the tensor": (FOUR.quantizers["output", "weight"], ("a", "b"), ("a", "b")),
}


def on_devices(quantizer: Quantizer, spec: tuple, axes: tuple[str, ...], x: np.ndarray) -> Quantized:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    shard = PartitionSpec(*spec)
    by_tensor = quantizer.block == PER_TENSOR
    by_row = quantizer.block.contracted is None
    scales = PartitionSpec() if by_tensor else PartitionSpec(spec[0], None if by_row else spec[1])
    of_tensor = PartitionSpec() if quantizer.scale.of_tensor else None
    function = jax.shard_map(
        partial(quantized, quantizer=quantizer, axes=axes),
        mesh=mesh,
        in_specs=shard,
        out_specs=Quantized(shard, scales, of_tensor),
        check_vma=False,
    )
    return jax.jit(function)(x)


@pytest.mark.parametrize("case", CASES)
def test_shards_have_the_bytes_of_the_tensor(case: str) -> None:
    quantizer, spec, axes = CASES[case]
    x = ordinary(7, SHAPE)
    ours, expected = on_devices(quantizer, spec, axes, x), jax.jit(partial(quantized, quantizer=quantizer))(x)
    for our, their in zip(ours, expected, strict=True):
        if their is not None:
            assert np.asarray(our).tobytes() == np.asarray(their).tobytes()


def test_a_device_that_agrees_with_no_other_has_other_bytes() -> None:
    """Otherwise the cases above would test nothing."""
    quantizer, spec, _ = CASES["per tensor, of both dims"]
    x = ordinary(7, SHAPE)
    ours, expected = on_devices(quantizer, spec, (), x), quantized(x, quantizer)
    assert (np.asarray(ours.codes).view(np.uint8) != np.asarray(expected.codes).view(np.uint8)).mean() > 0.3


def test_not_a_number_on_one_device_is_not_a_number_on_all() -> None:
    quantizer, spec, axes = CASES["per tensor, of both dims"]
    x = ordinary(7, SHAPE)
    x[3, 5] = np.nan
    ours = on_devices(quantizer, spec, axes, x)
    assert np.isnan(np.asarray(ours.scales)).all()
    assert np.isnan(np.asarray(ours.codes).astype(np.float32)).all()
