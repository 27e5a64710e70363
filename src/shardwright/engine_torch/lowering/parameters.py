"""The weights of a plan as PyTorch keeps them: one parameter a layer, placed as the plan says before anything is gathered.

| axes of a weight at rest | by whom |
|---|---|
| those that cut it in use too (``tensor``, ``expert``) | a DTensor, made here: the part of a rank is its own |
| those that it is gathered over | ``fully_shard``, in groups of weights that are gathered together (``gathering.py``) |
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.fsdp_groups import WeightOfLayer
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import joined


def empty_parameter(one: WeightOfLayer, ranks: Ranks) -> nn.Parameter:
    """A parameter without values, on the device of meta, cut as it is in use: what ``fully_shard`` begins with."""
    mesh = ranks.mesh
    shape = tuple(size // mesh.size(dim.axes) for size, dim in zip(one.shape, one.in_use.dims, strict=True))
    local = torch.empty(shape, dtype=torch_dtype(one.dtype), device="meta")
    cutting = mesh.larger_than_one(mesh.in_mesh_order(one.in_use.axes))
    if not cutting:
        return nn.Parameter(local)
    placements = cutting_placements(one.in_use, cutting)
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
