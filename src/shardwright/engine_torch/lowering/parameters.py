"""The weights of a plan as PyTorch stores them: one parameter per layer, sharded as the plan says before any is gathered.

| axes of a weight at rest | sharded by |
|---|---|
| persistent axes: they shard it in use too (``tensor``, ``expert``) | a DTensor, made here, with the rank's local shard |
| gathered axes | ``fully_shard``, in FSDP parameter groups (``gathering.py``) |
| all, of a weight of which codes are gathered | a plain tensor, made here: the rank's shard at rest (``coded.py``) |
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
    """A parameter without values, on the meta device, sharded as in use: the input of ``fully_shard``."""
    mesh = ranks.mesh
    if one.of_codes:
        box = one.box(mesh, ranks.rank)
        shape = (0, *one.shape[1:]) if box is None else box.shape
        return nn.Parameter(torch.empty(shape, dtype=torch_dtype(one.dtype), device="meta"))
    shape = tuple(size // mesh.size(dim.axes) for size, dim in zip(one.shape, one.in_use.dims, strict=True))
    local = torch.empty(shape, dtype=torch_dtype(one.dtype), device="meta")
    axes = mesh.larger_than_one(mesh.in_mesh_order(one.in_use.axes))
    if not axes:
        return nn.Parameter(local)
    placements = placements_of(one.in_use, axes)
    on = joined([ranks.submesh([axis]) for axis in axes]) if len(axes) > 1 else ranks.submesh(axes)
    stride = tuple(prod(one.shape[dim + 1 :]) for dim in range(len(one.shape)))
    return nn.Parameter(
        DTensor.from_local(local, on, placements, run_check=False, shape=torch.Size(one.shape), stride=stride)
    )


def placements_of(spec: Spec, axes: tuple[str, ...]) -> list[Placement]:
    """The DTensor placement of each of the axes."""
    dims = [spec.dim_of(axis) for axis in axes]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """A rank's local shard of a parameter or of its gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
