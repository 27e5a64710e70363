"""A spec as DTensor placements, one for each mesh axis, and the rows that placements give each device.

A spec lists the axes of a dim major first. Placements apply in mesh order. So an axis that is more major on its dim
but later in the mesh enters the placements of the axes before it, as the split factor of a strided shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.core.boxes.boxes import shard_range
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec

RowRange = tuple[int, int]
"""Rows ``start <= row < stop`` of one dim."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """The mesh axis does not shard the tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh axis shards ``dim`` as ``torch.chunk`` does."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The mesh axis shards each of ``split_factor`` chunks of ``dim``; device i holds shard i of every chunk."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


Placement = Replicate | Shard | StridedShard


def placements_of(spec: Spec, mesh: Mesh) -> tuple[Placement, ...]:
    """The DTensor placements equivalent to ``spec``, one for each mesh axis in mesh order.

    The split factor of an axis is the product of the sizes of the axes that are more major on its dim but later in
    the mesh; if that is 1, the placement is a plain ``Shard``. ``fully_shard`` gives these placements to a weight
    that tensor parallelism has already sharded:

    >>> mesh = Mesh.of(replica=2, fsdp=4, tensor=8)
    >>> print(*placements_of(Spec.of(heads=["tensor", "fsdp"], embed=[]), mesh))
    R _S(0, 8) S(0)
    >>> print(*placements_of(Spec.of(embed=["fsdp"], heads=["tensor"]), mesh))
    R S(0) S(1)
    """
    return tuple(_placement_of(spec, mesh, axis) for axis in mesh.names)


def _placement_of(spec: Spec, mesh: Mesh, axis: str) -> Placement:
    dim = spec.dim_of(axis)
    if dim is None:
        return Replicate()
    axes = spec.dims[dim].axes
    later = mesh.names[mesh.names.index(axis) + 1 :]
    split_factor = mesh.size(major for major in axes[: axes.index(axis)] if major in later)
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor)


def as_fully_shard_names(at_rest: Spec, in_use: Spec, mesh: Mesh) -> tuple[Spec, Mesh]:
    """The spec and the mesh of a parameter that ``fully_shard`` has sharded: the gathered axes are one axis, and it comes
    before the axes in use. Axes that shard neither are left out, and those of size 1.

    >>> mesh = Mesh.of(fsdp=2, tensor=4, context=3)
    >>> spec, joined = as_fully_shard_names(Spec.of(vocab=["tensor", "fsdp", "context"]), Spec.of(vocab=["tensor"]), mesh)
    >>> str(spec), str(joined)
    ('vocab/tensor/fsdp_context', 'fsdp_context 6 x tensor 4')
    """
    kept = mesh.larger_than_one(mesh.in_mesh_order(in_use.axes))
    gathered = mesh.larger_than_one(mesh.in_mesh_order(axis for axis in at_rest.axes if axis not in in_use.axes))
    joint = "_".join(gathered)
    dims = []
    for dim in at_rest.dims:
        axes = [axis for axis in dim.axes if axis in kept]
        dims.append(replace(dim, axes=(*axes, joint) if set(dim.axes) & set(gathered) else tuple(axes)))
    sizes = {**({joint: mesh.size(gathered)} if gathered else {}), **{axis: mesh.shape[axis] for axis in kept}}
    return Spec(tuple(dims)), Mesh.of(**sizes)


def placement_rows(size: int, applied: Iterable[tuple[Placement, int, int]]) -> tuple[RowRange, ...]:
    """The ranges of rows of one dim that a device holds, ascending, no two of them adjacent.

    ``applied``: (placement, size of its mesh axis, the device's index along it), in mesh order. A placement shards
    the rows that the ones before it left, as if these were one contiguous tensor.
    """
    ranges: list[RowRange] = [(0, size)] if size else []
    for placement, number, index in applied:
        if isinstance(placement, Replicate):
            continue
        split_factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        num_rows = sum(stop - start for start, stop in ranges)
        held: list[RowRange] = []
        for chunk in range(split_factor):
            low, high = shard_range(num_rows, [(split_factor, chunk), (number, index)])
            held += _rows_between(ranges, low, high)
        ranges = _joined(held)
    return tuple(ranges)


def misnamed_dims(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
    """The dims on which the placements of ``spec`` give a device other rows than it holds.

    Each axis of ``spec`` has a split of its own; ``as_fully_shard_names`` gives such a spec. FSDP2 chunks the local shard of
    tensor parallelism. The placements shard in the reverse order, and on a dim that the axes do not divide the two can differ
    (PyTorch #168134): ``reloading.py`` says what a checkpoint of PyTorch's makes of it. A dim without a strided
    placement always agrees, and so does one that its axes divide.

    >>> spec, mesh = Spec.of(heads=["tensor", "fsdp"]), Mesh.of(fsdp=4, tensor=2)
    >>> misnamed_dims(spec, mesh, (8,)), misnamed_dims(spec, mesh, (9,)), misnamed_dims(spec, mesh, (10,))
    ((), (0,), ())
    """
    assert len(spec.dims) == len(shape), (str(spec), tuple(shape))
    placements = placements_of(spec, mesh)
    strided = {placement.dim for placement in placements if isinstance(placement, StridedShard)}
    return tuple(dim for dim in sorted(strided) if _misnamed(spec, mesh, placements, dim, shape[dim]))


def _misnamed(spec: Spec, mesh: Mesh, placements: Sequence[Placement], dim: int, size: int) -> bool:
    major_first = spec.dims[dim].axes
    if size % mesh.size(major_first) == 0:
        return False
    sizes = mesh.shape
    placement = dict(zip(mesh.names, placements, strict=True))
    for indices in product(*(range(sizes[axis]) for axis in major_first)):
        here = dict(zip(major_first, indices, strict=True))
        start, stop = shard_range(size, [(sizes[axis], here[axis]) for axis in major_first])
        applied = [(placement[axis], sizes[axis], here[axis]) for axis in mesh.in_mesh_order(major_first)]
        if placement_rows(size, applied) != (((start, stop),) if start < stop else ()):
            return True
    return False


def _rows_between(ranges: Iterable[RowRange], low: int, high: int) -> list[RowRange]:
    """Rows ``low`` to ``high`` of those in ``ranges``, counted from the first of them."""
    found: list[RowRange] = []
    for start, stop in ranges:
        a, b = start + max(low, 0), min(start + high, stop)
        if a < b:
            found.append((a, b))
        low, high = low - (stop - start), high - (stop - start)
    return found


def _joined(ranges: Iterable[RowRange]) -> list[RowRange]:
    result: list[RowRange] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result
