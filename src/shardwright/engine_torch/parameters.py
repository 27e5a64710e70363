"""The weights of a plan as PyTorch keeps them: one parameter a layer, placed as the plan says before anything is gathered.

| axes of a weight at rest | by whom |
|---|---|
| those that cut it in use too (``tensor``, ``expert``) | a DTensor, made here: the part of a rank is its own |
| those that it is gathered over | ``fully_shard``, in groups of weights that are gathered together (``gathering.py``) |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.core.box import Box
from shardwright.core.boxes import shard_box
from shardwright.core.crossing import weight_ways
from shardwright.core.mesh import Mesh
from shardwright.core.plan import Plan, TensorPlan
from shardwright.core.spec import Spec
from shardwright.engine_torch.dtypes import torch_dtype
from shardwright.engine_torch.mesh import Ranks
from shardwright.engine_torch.private import joined


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOfLayer:
    """One parameter: a weight of the table, of one layer where layers share the row.

    ``key``: its name in this engine, ``layers.3.attention.q``. ``at_rest``: of one layer, as PyTorch stores it. ``cut``:
    what cuts it in use. ``gathered``: the axes that only store it, mesh order. ``summed``: those over which its gradient
    is summed and not cut. ``gathered_in``: the dtype that travels.
    """

    key: str
    weight: str
    layer: int | None
    shape: tuple[int, ...]
    at_rest: Spec
    cut: Spec
    gathered: tuple[str, ...]
    summed: tuple[str, ...]
    dtype: str
    gathered_in: str

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """What a rank keeps, in the stored dims; None where it keeps nothing."""
        return shard_box(self.at_rest, mesh, self.shape, rank, "nested")


def weights_of(plan: Plan) -> tuple[WeightOfLayer, ...]:
    """Every trained parameter of a plan, the table's order, layer by layer within a row."""
    frozen = {weight.name for weight in plan.request.table.weights if weight.frozen}
    return tuple(one for row in plan.weights if row.name not in frozen for one in _layers(plan, row))


def _layers(plan: Plan, row: TensorPlan) -> Iterator[WeightOfLayer]:
    mesh = plan.mesh
    way = weight_ways(plan.request, mesh, row)[row.component]
    leaves = [axis for axis in way.at_rest.axes if axis not in way.whole.axes]
    summed = mesh.larger_than_one(axis for axis, kind in row.gradient.items() if kind == "all-reduce")
    for layer in range(row.num) if row.stack is not None else (None,):
        yield WeightOfLayer(
            key=key_of(row.name, layer),
            weight=row.name,
            layer=layer,
            shape=row.shape,
            at_rest=way.at_rest,
            cut=way.whole,
            gathered=mesh.larger_than_one(mesh.in_mesh_order(leaves)),
            summed=mesh.in_mesh_order(summed),
            dtype=row.dtype,
            gathered_in=way.gathered_in,
        )


def key_of(weight: str, layer: int | None) -> str:
    """
    >>> key_of("layers.attention.q", 3), key_of("embedding.tokens", None)
    ('layers.3.attention.q', 'embedding.tokens')
    """
    if layer is None:
        return weight
    stack, _, name = weight.partition(".")
    return f"{stack}.{layer}.{name}"


def empty_parameter(one: WeightOfLayer, ranks: Ranks) -> nn.Parameter:
    """A parameter without values, on the device of meta, cut as it is in use: what ``fully_shard`` begins with."""
    mesh = ranks.mesh
    shape = tuple(size // mesh.size(dim.axes) for size, dim in zip(one.shape, one.cut.dims, strict=True))
    local = torch.empty(shape, dtype=torch_dtype(one.dtype), device="meta")
    cutting = mesh.larger_than_one(mesh.in_mesh_order(one.cut.axes))
    if not cutting:
        return nn.Parameter(local)
    placements = cutting_placements(one.cut, cutting)
    on = joined([ranks.submesh([axis]) for axis in cutting]) if len(cutting) > 1 else ranks.submesh(cutting)
    stride = tuple(prod(one.shape[dim + 1 :]) for dim in range(len(one.shape)))
    return nn.Parameter(
        DTensor.from_local(local, on, placements, run_check=False, shape=torch.Size(one.shape), stride=stride)
    )


def cutting_placements(cut: Spec, axes: tuple[str, ...]) -> list[Placement]:
    """One placement for each of the axes."""
    dims = [cut.dim_of(axis) for axis in axes]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """A rank's own part of a parameter or of its gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def by_key(weights: tuple[WeightOfLayer, ...]) -> Mapping[str, WeightOfLayer]:
    return {one.key: one for one in weights}
