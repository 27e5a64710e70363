"""Weights written in FP8 with a scale for each block, as DeepSeek-V3 is published.

| a matrix of attention, of a feed-forward layer or of an expert | written |
|---|---|
| whose values are those of the codes and scales that an import kept | these, byte for byte |
| any other | quantized by the rule of recipe ``fp8-block``, with scales that are powers of two |

Everything else keeps its floating-point dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint import Checkpoint, TensorInfo
from shardwright.checkpoint.reading.casting import cast
from shardwright.core.findings.errors import InputError
from shardwright.core.model.table import ModelTable
from shardwright.core.quantization.products import quantized_layers
from shardwright.core.recipes.arrays import Arrays
from shardwright.core.recipes.formats import E4M3
from shardwright.core.recipes.formula import quantize
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Block, Quantizer
from shardwright.interop.hugging_face.published import Published
from shardwright.interop.hugging_face.weights.files.quantized import (
    FP8,
    QUANTIZED,
    SUFFIX,
    VALUES,
    block_of,
    scales_shape,
)
from shardwright.interop.hugging_face.weights.mapping import PublishedTensor
from shardwright.training.published import KEPT

BLOCK = (128, 128)
RECIPE = preset("fp8-block")
SCALES_DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """What is written in FP8: the names of tensors, and rows and columns of a block."""

    names: frozenset[str]
    block: tuple[int, int]

    def scales(self, tensors: Iterable[PublishedTensor]) -> tuple[PublishedTensor, ...]:
        """The tensors of scales."""
        return tuple(
            PublishedTensor(name=one.name + SUFFIX, shape=scales_shape(one.shape, self.block), pieces=())
            for one in tensors
            if one.name in self.names
        )

    def dtypes(self) -> Mapping[str, str]:
        return dict.fromkeys(self.names, FP8) | {name + SUFFIX: SCALES_DTYPE for name in self.names}


def fp8_of(table: ModelTable, tensors: Sequence[PublishedTensor], config: Published | None) -> Fp8:
    """The matrices that recipe ``fp8-block`` quantizes, in the blocks of a configuration, or of 128 x 128.

    Raises InputError without a configuration, which says to readers what has one scale, and for one of other FP8.
    """
    if config is None:
        raise InputError(
            "--fp8 needs a configuration, which says what has one scale, and the checkpoint has none. Give it with --config."
        )
    quantized = {weight.name for weight in table.weights if quantized_layers(weight, RECIPE, table)}
    names = frozenset(one.name for one in tensors if one.pieces[0].weight.name in quantized)
    return Fp8(names=names, block=block_of(config) if QUANTIZED in config.values else BLOCK)


def written_as_fp8(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The codes of float32 values, uint8 of the same shape, and their scales. The last two dims are a matrix, outputs first."""
    rows, columns = values.shape[-2:]
    quantizer = _quantizer(block)
    matrices = values.reshape(-1, rows, columns)
    # Of infinite values the scale is NaN.
    with np.errstate(all="ignore"):
        found = [quantize(matrix, quantizer, ARRAYS) for matrix in matrices]
    codes = np.stack([one.codes for one in found]).reshape(values.shape)
    return codes, np.stack([one.scales for one in found]).reshape(scales_shape(values.shape, block))


def kept_of(
    checkpoint: Checkpoint, name: str, values: np.ndarray, stored: str, block: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """The codes and scales that an import kept of a tensor, if ``values`` are theirs in dtype ``stored``; None if not, or without any."""
    shape = scales_shape(values.shape, block)
    infos = {KEPT + name: (values.shape, FP8), KEPT + name + SUFFIX: (shape, SCALES_DTYPE)}
    for one, (needed, dtype) in infos.items():
        info = checkpoint.tensors.get(one)
        if info is None or (tuple(info.shape), info.dtype) != (needed, dtype):
            return None
    codes = checkpoint.read_box(KEPT + name, raw=True).view(np.uint8)
    scales = checkpoint.read_box(KEPT + name + SUFFIX, raw=True).view(np.float32)
    theirs = _dequantized(codes, scales, block)
    in_stored = cast(theirs.view(np.uint32), "float32", stored)
    same = np.array_equal(cast(in_stored, stored, "float32"), values.view(np.uint32))
    return (codes, scales) if same else None


def infos_of(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[TensorInfo, TensorInfo]:
    """What a checkpoint keeps of a tensor in FP8."""
    return (
        TensorInfo(name=KEPT + name, shape=shape, dtype=FP8),
        TensorInfo(name=KEPT + name + SUFFIX, shape=scales_shape(shape, block), dtype=SCALES_DTYPE),
    )


def _dequantized(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    values = VALUES[codes]
    for dim, size in ((-2, block[0]), (-1, block[1])):
        scales = np.repeat(scales, size, axis=dim)
    values *= scales[..., : codes.shape[-2], : codes.shape[-1]]
    return values


def _quantizer(block: tuple[int, int]) -> Quantizer:
    planned = RECIPE.quantizers["output", "weight"]
    rows, columns = block
    return Quantizer(dtype=planned.dtype, block=Block(contracted=columns, other=rows), scale=planned.scale)


_POSITIVE = VALUES[:127]
"""0 and all positive values, in the order of their codes."""


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """The codes of values within the range of E4M3, to the nearest, ties to even; of NaN any code."""
    assert dtype == E4M3, dtype
    size = np.where(np.isnan(x), np.float32(0), np.abs(x))
    exponent = np.maximum(np.frexp(size)[1] - 1, -6) - 3
    rounded = np.ldexp(np.rint(np.ldexp(size, -exponent)), exponent)
    return np.searchsorted(_POSITIVE, rounded).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def _padded(x: np.ndarray, dim: int, size: int) -> np.ndarray:
    return np.pad(x, [(0, size - x.shape[dim] if each == dim else 0) for each in range(x.ndim)])


ARRAYS = Arrays(
    float32=lambda x: np.asarray(x, np.float32),
    int32=lambda x: np.asarray(x, np.int32),
    bits=lambda x: x.view(np.int32),
    of_bits=lambda x: np.asarray(x, np.int32).view(np.float32),
    quotient=lambda x, y: np.divide(np.float32(x), np.float32(y)),
    least=np.minimum,
    most=np.maximum,
    where=lambda condition, x, y: np.where(condition, x, y).astype(np.result_type(x if np.ndim(x) else y)),
    largest=lambda x, dims: x.max(axis=dims, keepdims=True),
    reshape=lambda x, shape: x.reshape(tuple(shape)),
    padded=_padded,
    first=lambda x, dim, size: np.take(x, range(size), axis=dim),
    joined=lambda x, y: np.concatenate((x, y), axis=-1),
    cast=_cast,
    bytes_of=lambda x: x,
    as_bytes=lambda x: np.asarray(x, np.uint8),
    as_codes=lambda x, _: x,
    in_rows=lambda _: True,
    fused=lambda function: function,
)
"""NumPy's functions for the core's formula of quantizers; codes are uint8."""
