"""How weights that rest as codes are quantized, and where their codes and scales are on a mesh.

A scale of all of a dim is one for the ranks that shard that dim, FSDP and tp alike, and replicas are never reduced over: all of that follows
from the placement of the weight, and never from the names of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.formula import amax_of
from shardwright.core.recipes.recipe import Product, Recipe
from shardwright.engine_torch.io.private import elements_of
from shardwright.engine_torch.modules.codes.coded_weight import CodedWeight, Held, as_bytes
from shardwright.engine_torch.modules.codes.copies import DIM_OF, Copy
from shardwright.engine_torch.modules.parts.arguments import multiples_near
from shardwright.engine_torch.modules.parts.tensor_parallel import peers_in, ranks_of
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.delayed import Kept, factor_from, reduce_together
from shardwright.engine_torch.precision.operands import codes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ToQuantize:
    """A weight at rest whose codes follow from ``values``, the elements of this rank. ``delayed``: its factor, where that is one of earlier
    steps; ``measured``: these had other weights, so that codes need the factor of this one."""

    parameter: torch.Tensor
    held: Held
    values: torch.Tensor
    weight_mesh: DeviceMesh | None
    delayed: Kept | None
    measured: bool


@torch.no_grad()
def quantize_together(weights: Sequence[ToQuantize]) -> None:
    """Quantize weights, in the memory that their codes have; amaxes are reduced in one collective for each set of groups. Every rank that
    holds a shard of one calls this."""
    jobs = [(weight, number, copy) for weight in weights for number, copy in enumerate(weight.held.copies)]
    amaxes = _agreed([(weight, copy) for weight, _, copy in jobs if weight.delayed is None])
    amaxes |= _agreed([(weight, copy) for weight, _, copy in jobs if weight.measured], always=True)
    for weight, number, copy in jobs:
        amax, factor = amaxes.get((id(weight), copy.product)), None
        if weight.delayed is not None:
            factor = weight.delayed.factor
            if amax is not None:
                factor = factor_from(amax.view(()), copy.quantizer, factor)
        codes = codes_of(copy.operand(weight.values), copy.quantizer, None if weight.delayed else amax, factor=factor)
        arrays = copy.at_rest(codes)
        if number < len(weight.held.arrays):
            for array, new in zip(weight.held.arrays[number], arrays, strict=True):
                as_bytes(array).copy_(as_bytes(new))
        else:
            weight.held.arrays.append(arrays)
    for weight in weights:
        weight.held.settle(weight.parameter)


@torch.no_grad()
def measure_together(weights: Sequence[ToQuantize]) -> None:
    """Raise the amaxes of weights that are delayed, at the end of a step, to those of all their shards."""
    amaxes = _agreed([(weight, weight.held.copies[0]) for weight in weights], always=True)
    for weight in weights:
        assert weight.delayed is not None
        amax = amaxes[id(weight), weight.held.copies[0].product].view(())
        weight.delayed.amax.copy_(torch.maximum(weight.delayed.amax, amax))


def _agreed(
    weights: Sequence[tuple[ToQuantize, Copy]], *, always: bool = False
) -> dict[tuple[int, Product], torch.Tensor]:
    """The amaxes of copies of weights on which ranks agree, by weight and product. ``always``: also of those that one rank has entire."""
    agreed: dict[tuple[int, Product], torch.Tensor] = {}
    together: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for weight, copy in weights:
        groups = agreeing(weight.parameter, copy, weight.weight_mesh)
        if groups or always:
            amax = amax_of(copy.operand(weight.values), copy.quantizer, ARRAYS).contiguous()
            agreed[id(weight), copy.product] = amax
            together.setdefault(groups, []).append(amax)
    for groups, amaxes in together.items():
        for group in groups:
            reduce_together(amaxes, peers_in(group))
    return agreed


def held_of(parameter: torch.Tensor) -> Held | None:
    """What a parameter consists of that is codes; None: it is none."""
    local = elements_of(parameter)
    return local.held if isinstance(local, CodedWeight) else None


def sharded_dims(parameter: torch.Tensor) -> Sequence[tuple[int, int]]:
    """For each dim of a parameter's mesh that shards it over several ranks, the number of the mesh's dim and the dim that it shards."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return [
        (number, int(getattr(placement, "dim")))  # noqa: B009
        for number, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate) and mesh.size(number) > 1
    ]


def agreeing(parameter: torch.Tensor, copy: Copy, weight_mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which an amax is reduced, one after the other: those that shard a dim of which all elements share a scale.
    Replicas are in none of them, whatever the axes are called."""
    entire = {DIM_OF[dim] for dim in copy.entire()}
    dims = sharded_dims(parameter)
    if not isinstance(parameter, DTensor) or not dims:
        return ()
    if weight_mesh is not None and all(dim in entire for _, dim in dims):
        return (weight_mesh.get_group(),)
    return tuple(parameter.device_mesh.get_group(number) for number, dim in dims if dim in entire)


def shard_group(parameter: torch.Tensor, *, with_tp: bool = False) -> list[int] | None:
    """The ranks that hold the shards of a weight, without replicas, or with those along tp, the last dim of its mesh; None: this one alone."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    sharding = {number for number, _ in sharded_dims(parameter)} | ({mesh.ndim - 1} if with_tp else set())
    index = tuple(slice(None) if number in sharding else at for number, at in enumerate(here))
    return sorted(mesh.mesh[index].flatten().tolist())


def require_weight_mesh(parameter: torch.Tensor, weight_mesh: DeviceMesh | None, label: str, *, on_tp: bool) -> None:
    """Raises InputError for a ``weight_mesh`` that has not the ranks that shard a weight. Ranks of tp that replicate it may be in it, as those that
    shard other weights."""
    ranks = shard_group(parameter)
    allowed = (ranks, shard_group(parameter, with_tp=on_tp))
    if weight_mesh is not None and ranks is not None and sorted(ranks_of(weight_mesh)) not in allowed:
        raise InputError(
            f"{label}: weight_mesh has the ranks {ranks_of(weight_mesh)}, and those that shard it are {ranks}: FSDP and tp as one dim, "
            f"without replicas. Give these, or leave weight_mesh out: they follow from the placement."
        )


def require_blocks(
    parameter: torch.Tensor, copies: Sequence[Copy], recipe: Recipe, tp_dim: int | None, label: str
) -> None:
    """Raises InputError where shards of a weight end inside of a block, or are not equal, or where ``fully_shard`` shards inputs."""
    dims = [dim for _, dim in sharded_dims(parameter)]
    if dims.count(1) > (tp_dim == 1):
        raise InputError(
            f"{label}: fully_shard shards dim 1 of it, by a shard_placement_fn, and codes are gathered along dim 0. Shard dim 0, or leave "
            f"out primary_weights."
        )
    for dim, axis in DIM_OF.items():
        num = _size(parameter, axis)
        unit = max(max(copy.extent(dim) or 1, copy.elements(dim)) for copy in copies)
        size = parameter.shape[axis]
        if num > 1 and size % (num * unit):
            raise InputError(
                f"{label} {tuple(parameter.shape)}: {num} ranks shard dim {axis}, which is {size}, and '{recipe.name}' has blocks of {unit} "
                f"along it, which no shard may divide where weights rest as codes. Take {multiples_near(size, num * unit)}, fewer ranks, or "
                f"leave out primary_weights."
            )


def _size(parameter: torch.Tensor, axis: int) -> int:
    """Of how many ranks each has a shard of a dim."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return prod(mesh.size(number) for number, dim in sharded_dims(parameter) if dim == axis) if mesh is not None else 1


def array_names(name: str, copies: Sequence[Copy]) -> Iterator[tuple[str, int, int]]:
    """For each array of a weight its name in the state, the number of the copy and its own."""
    for number, copy in enumerate(copies):
        prefix = f"{name}_turned" if copy.turned else name
        yield f"{prefix}_codes", number, 0
        yield f"{prefix}_scales", number, 1
        if copy.quantizer.scale.of_tensor:
            yield f"{prefix}_scale_of_tensor", number, 2


def as_placed(array: torch.Tensor, parameter: torch.Tensor, copy: Copy | None, number: int) -> torch.Tensor:
    """An array of a weight, on the weight's mesh, with its memory. ``copy``: None where it is the main weight."""
    if not isinstance(parameter, DTensor):
        return array.detach()
    divided = {
        axis
        for dim, axis in DIM_OF.items()
        if number != 2 and (copy is None or number == 0 or copy.extent(dim) is not None)
    }
    placements: list[Placement] = [
        placement if int(getattr(placement, "dim", -1)) in divided else Replicate()
        for placement in parameter.placements
    ]
    shape = [size * (_size(parameter, axis) if axis in divided else 1) for axis, size in enumerate(array.shape)]
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(
        array.detach(), parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
