"""``torch.distributed.checkpoint`` on ranks: a parameter of tensor parallelism, sharded by ``fully_shard``, saved and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

OLD = -1.0
"""What a parameter has before a load; a saved one has in each row its number."""


def reloaded(size: int, tensor: int, folder: Path) -> str:
    """What this rank has after a save and a load under the same layout, and, on the first rank, whether a load of all rows on
    one device is right: "not saved", "right", "old rows", "wrong rows"; with "alone: " and the same or "fails"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("fsdp", "tensor"))
    with warnings.catch_warnings():
        # PyTorch warns of its own deprecated functions.
        warnings.simplefilter("ignore")
        return _reloaded(size, mesh, folder)


def _reloaded(size: int, mesh: DeviceMesh, folder: Path) -> str:
    parameter = _parameter(size, mesh)
    expected = parameter.to_local().detach().clone()
    try:
        save({"w": parameter}, checkpoint_id=folder)
    except CheckpointException:
        return "not saved"
    with torch.no_grad():
        parameter.to_local().fill_(OLD)
    load({"w": parameter}, checkpoint_id=folder)
    found = _found(parameter.to_local().detach(), expected)
    if dist.get_rank():
        return found
    full = {"w": torch.full((size, 2), OLD)}
    try:
        load(full, checkpoint_id=folder, no_dist=True)
    except CheckpointException:
        return f"{found}, alone: fails"
    return f"{found}, alone: {_found(full['w'], _rows(size))}"


def _found(values: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(values, expected):
        return "right"
    return "old rows" if (values == OLD).any() else "wrong rows"


def _rows(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)[:, None].expand(size, 2).contiguous()


def _parameter(size: int, mesh: DeviceMesh) -> DTensor:
    parts = torch.chunk(_rows(size), mesh["tensor"].size())
    here = mesh["tensor"].get_local_rank()
    own = parts[here] if here < len(parts) else _rows(size)[:0]
    module = nn.Module()
    placed = DTensor.from_local(
        own.clone(), mesh["tensor"], [Shard(0)], run_check=False, shape=torch.Size([size, 2]), stride=(2, 1)
    )
    module.register_parameter("w", nn.Parameter(placed))
    fully_shard(module, mesh=mesh["fsdp"])
    assert isinstance(module.w, DTensor)
    return module.w
