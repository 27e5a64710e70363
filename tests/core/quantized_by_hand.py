"""Quantization of a matrix in NumPy, at once and device by device: the oracle of who must agree and what is free.

It knows blocks, scales and where devices have their elements. It knows nothing of the derivation under test but the axes over
which an amax is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.recipes.formats import FORMATS
from shardwright.core.recipes.recipe import Quantizer

Indices = tuple[np.ndarray, np.ndarray]
"""The rows and the columns of the full matrix that a device has, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What each device has of a matrix in one microbatch. ``run``: so many tokens of a row are consecutive on a device, and blocks
    of tokens begin with each row; None for what has no tokens."""

    mesh: Mesh
    of_device: tuple[Indices, ...]
    run: int | None = None


def starts(size: int, extent: int | None, run: int | None) -> np.ndarray:
    """Where the blocks of a dim begin; the last one of a run may be short."""
    if extent is None:
        return np.zeros(1, int)
    run = run or max(size, 1)
    return np.concatenate([np.arange(first, min(first + run, size), extent) for first in range(0, size, run)])


def amaxes(values: np.ndarray, blocks: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The largest absolute value of each block."""
    found = np.abs(values)
    for axis, first in enumerate(blocks):
        found = np.maximum.reduceat(found, first, axis)
    return found


def scales(amax: np.ndarray, quantizer: Quantizer, of_tensor: np.floating | None) -> np.ndarray:
    largest = np.float32(FORMATS[quantizer.dtype].largest)
    safe = np.where(amax > 0, amax, largest).astype(np.float32)
    if quantizer.scale.rule == "power of two up":
        return np.exp2(np.ceil(np.log2(safe.astype(np.float64) / largest)))
    if quantizer.scale.rule == "power of two down":
        return np.exp2(np.floor(np.log2(safe.astype(np.float64))) - np.floor(np.log2(float(largest))))
    if of_tensor is None:
        return safe / largest
    narrow = FORMATS[quantizer.scale.dtype]
    whole = of_tensor / (largest * np.float32(narrow.largest))
    block = np.clip(safe / largest / whole, narrow.smallest, narrow.largest)
    return block.astype(getattr(ml_dtypes, quantizer.scale.dtype)).astype(np.float32) * whole


def quantized(values: np.ndarray, scale: np.ndarray, blocks: tuple[np.ndarray, np.ndarray], dtype: str) -> np.ndarray:
    """The values that the codes stand for."""
    for axis, first in enumerate(blocks):
        scale = np.repeat(scale, np.diff(np.append(first, values.shape[axis])), axis)
    largest = FORMATS[dtype].largest
    codes = np.clip(values / scale, -largest, largest).astype(getattr(ml_dtypes, dtype))
    return codes.astype(np.float32) * scale


def rotated(values: np.ndarray, size: int, run: int | None) -> np.ndarray:
    """A Hadamard transform of each ``size`` consecutive tokens of a row; fewer at its end are left as they are."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # In float64, so that the order of a sum does not show in float32.
    turned = values.astype(np.float64)
    first = starts(len(values), size, run)
    for start, length in zip(first, np.diff(np.append(first, len(values))), strict=True):
        if length == size:
            turned[start : start + size] = matrix @ turned[start : start + size] / np.sqrt(size)
    return turned.astype(np.float32)


def by_devices(
    full: np.ndarray, held: Held, quantizer: Quantizer, extents: tuple[int | None, int | None], reduced: tuple[str, ...]
) -> np.ndarray:
    """The full matrix, put together of what each device quantizes; the amaxes are the largest over ``reduced``.

    Asserts that replicas have the same values.
    """
    local = [full[np.ix_(*indices)] for indices in held.of_device]
    if quantizer.hadamard is not None:
        local = [rotated(one, quantizer.hadamard, held.run) for one in local]
    rows, columns = extents
    blocks = [(starts(one.shape[0], rows, held.run), starts(one.shape[1], columns, None)) for one in local]
    own = [amaxes(one, of_it) for one, of_it in zip(local, blocks, strict=True)]
    tensors = [np.abs(one).max() for one in local]
    result = np.full(full.shape, np.nan, np.float32)
    for device, (one, indices) in enumerate(zip(local, held.of_device, strict=True)):
        group = held.mesh.group(device, reduced)
        entire = np.maximum.reduce([own[member] for member in group]) if None in extents else own[device]
        tensor = max(tensors[member] for member in group) if quantizer.scale.of_tensor else None
        scale = scales(entire, quantizer, None if tensor is None else np.float32(tensor))
        values = quantized(one, scale, blocks[device], quantizer.dtype)
        place = np.ix_(*indices)
        known = result[place]
        assert np.array_equal(known[~np.isnan(known)], values[~np.isnan(known)]) or np.isnan(known).all(), "replicas"
        result[place] = values
    return result


def at_once(
    full: np.ndarray, quantizer: Quantizer, extents: tuple[int | None, int | None], run: int | None = None
) -> np.ndarray:
    """The full matrix, quantized on one device."""
    indices = (np.arange(full.shape[0]), np.arange(full.shape[1]))
    alone = Held(mesh=Mesh.of(one=1), of_device=(indices,), run=run)
    return by_devices(full, alone, quantizer, extents, ())


def shard_of(size: int, axes: tuple[str, ...], mesh: Mesh, device: int) -> range:
    """What a device has of a dim that axes shard evenly, major first."""
    number = 0
    for axis in axes:
        number = number * mesh.size(axis) + mesh.coordinates(device)[axis]
    each = size // mesh.size(axes)
    return range(number * each, (number + 1) * each)


def merged(sizes: tuple[int, ...], sharding: tuple[tuple[str, ...], ...], mesh: Mesh, device: int) -> np.ndarray:
    """The indices of a device along merged dims, major first."""
    ranges = [np.array(shard_of(size, axes, mesh, device)) for size, axes in zip(sizes, sharding, strict=True)]
    return np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), sizes).ravel()
