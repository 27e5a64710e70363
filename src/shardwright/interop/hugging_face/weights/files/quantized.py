"""Weights in FP8 with a scale for each block of a matrix: which tensor has which scales, and the values of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import numpy as np

from shardwright.checkpoint.reading.casting import FLOATS, cast
from shardwright.core.layout.faults import shown
from shardwright.interop.hugging_face.published import Published
from shardwright.interop.hugging_face.weights.files.safetensors_file import BY_CODE, FoundTensor

FP8 = "float8_e4m3fn"
SUFFIX = "_scale_inv"
"""Of the name of the scales: a value is its FP8 element times the scale of its block."""

QUANTIZED = "quantization_config"
VALUES_AS = "bfloat16"
"""The dtype of the values unless another is asked for: that of the published conversions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The scales of one FP8 tensor: float32, (matrices, blocks of rows, blocks of columns). ``block``: rows and columns."""

    values: np.ndarray
    block: tuple[int, int]
    shape: tuple[int, int]

    def dequantized(self, bits: np.ndarray, start: int) -> np.ndarray:
        """The values, in float32, of elements that are full rows from the flat index ``start``, all of one matrix.

        Shape of ``bits`` and of the result: (rows, columns).
        """
        rows, columns = self.shape
        matrix, first = divmod(start // columns, rows)
        assert start % columns == 0, (start, columns)
        assert first + len(bits) <= rows, (first, len(bits), rows)
        of_rows = self.values[matrix, np.arange(first, first + len(bits)) // self.block[0]]
        values = VALUES[bits]
        values *= np.repeat(of_rows, self.block[1], axis=1)[:, :columns]
        return values


def parted(tensors: Mapping[str, FoundTensor]) -> tuple[dict[str, FoundTensor], dict[str, FoundTensor]]:
    """The tensors of a folder without scales, and the scales by the name of the tensor that they belong to."""
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(SUFFIX)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    return rest, {name.removesuffix(SUFFIX): tensor for name, tensor in scales.items()}


def block_of(config: Published) -> tuple[int, int]:
    """Rows and columns of a block, by a configuration. Raises InputError where it does not say, and for another kind of FP8."""
    given = config.values.get(QUANTIZED)

    def refuse(message: str) -> NoReturn:
        config.refuse(QUANTIZED, f"'{QUANTIZED}' {message}")

    if not isinstance(given, dict):
        refuse(f"is {shown(given)}, and the folder has scales of FP8: {{'weight_block_size': [128, 128]}} is needed.")
    if given.get("quant_method", "fp8") != "fp8" or given.get("fmt", "e4m3") != "e4m3":
        refuse(
            f"is {shown(given.get('quant_method'))} in {shown(given.get('fmt'))}. Only fp8 in e4m3 is read: convert the "
            f"folder to bfloat16 first."
        )
    block = given.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)):
        refuse(f"has weight_block_size {shown(block)}, and two whole numbers above 0 are needed, as [128, 128].")
    return block[0], block[1]


def is_quantized(tensor: FoundTensor) -> bool:
    return tensor.dtype in BY_CODE and tensor.known.name == FP8


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor, whose last two dims are a matrix. The last blocks need not be full.

    >>> scales_shape((7168, 2112), (128, 128))
    (56, 17)
    """
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def faults(
    tensors: Mapping[str, FoundTensor], scales: Mapping[str, FoundTensor], block: tuple[int, int], names: set[str]
) -> Iterator[str]:
    """One line for each of the tensors with these ``names`` whose scales are missing, extra or of another shape."""
    for name in {**tensors, **scales}:
        if name not in names:
            continue
        tensor, scale = tensors.get(name), scales.get(name)
        if tensor is not None and is_quantized(tensor):
            yield from _fault(tensor, scale, block)
        elif scale is not None:
            why = "which is missing" if tensor is None else f"which is {tensor.dtype} and needs none"
            yield f"'{scale.name}': extra: scales of '{name}', {why}"


def _fault(tensor: FoundTensor, scale: FoundTensor | None, block: tuple[int, int]) -> Iterator[str]:
    name = f"{tensor.name}{SUFFIX}"
    if len(tensor.shape) < 2:
        yield f"'{tensor.name}': shape: found {tensor.shape} in FP8, needed a matrix"
    elif scale is None:
        yield f"'{name}': missing: the scales of '{tensor.name}', which is FP8"
    elif scale.shape != (needed := scales_shape(tensor.shape, block)):
        yield (
            f"'{name}': shape: found {scale.shape}, needed {needed}: one for each block of {block[0]} x {block[1]} of "
            f"{tensor.shape}"
        )
    elif scale.dtype not in BY_CODE or scale.known.name not in FLOATS:
        yield f"'{name}': dtype: found {scale.dtype}, needed one of {', '.join(FLOATS)}"


def read_scales(tensor: FoundTensor, scale: FoundTensor, block: tuple[int, int]) -> Scales:
    """The scales of a tensor without a fault. Raises InputError where they cannot be read."""
    bits = cast(scale.read(0, prod(scale.shape)), scale.known.name, "float32")
    rows, columns = tensor.shape[-2:]
    values = bits.view(np.float32).reshape(-1, *scale.shape[-2:])
    return Scales(values=values, block=block, shape=(rows, columns))


def _e4m3fn() -> np.ndarray:
    """The values of all 256 elements: a sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    size[bits & 127 == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


VALUES = _e4m3fn()
