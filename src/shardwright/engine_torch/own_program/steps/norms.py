"""The norm of all gradients and groups for an optimizer, where some weights are DTensors, of one mesh or several, and others plain tensors.

PyTorch's own functions stack all norms in one tensor, and an optimizer calls one kernel for many weights: both raise for such a mixture
(2.13: ``got mixed torch.Tensor and DTensor``, ``All operands must have the same mesh``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.core.findings.errors import InputError

Apart = Mapping[dist.ProcessGroup, Iterable[torch.Tensor]]
"""Tensors of which each rank of a group has its own, as a rank's experts; other plain tensors are the same on all ranks."""
Ranks = tuple[int, ...]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    apart: Apart | None = None,
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for weights on any mixture of meshes, and plain ones. All ranks call it.

    Returns the norm of all gradients before, a plain tensor without dims, the same on every rank. Every element counts once, on however
    many ranks it is. A weight without a gradient counts as 0, so ranks may have gradients of other experts. ``apart``: weights, plain or on
    meshes of their own, of which each rank of a group has others.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = _norm_of([(parameter, parameter.grad) for parameter in listed], norm_type, apart or {})
    if error_if_nonfinite and not torch.isfinite(norm):
        raise InputError(
            f"the norm of the gradients is {norm.item()}. Without error_if_nonfinite they would be scaled by it."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for parameter in listed:
            if (gradient := parameter.grad) is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor.to(local.device))
    return norm


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, *, apart: Apart | None = None
) -> torch.Tensor:
    """The norm of all elements of some tensors, as ``torch.nn.utils.get_total_norm``: a plain tensor, the same on every rank.

    All ranks give tensors on the same meshes. ``apart``: as of ``clip_grad_norm_``, of these tensors.
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return _norm_of([(tensor, tensor) for tensor in listed], norm_type, apart or {})


@torch.no_grad()
def _norm_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], norm_type: float, apart: Apart) -> torch.Tensor:
    """The norm of the second of each pair; where there is none, the first says over which ranks others have a part of it."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise InputError(f"norm_type is {norm_type}; it must be above 0, or infinite.")
    over: dict[int, list[dist.ProcessGroup]] = {}
    for group, tensors in apart.items():
        for tensor in tensors:
            over.setdefault(id(tensor), []).append(group)
    # By the groups of ranks to sum over, that of the innermost dim of a mesh first. All that is to be summed over a group next is summed
    # together, so that each is asked once.
    groups: dict[Ranks, tuple[dist.ProcessGroup, torch.device]] = {}
    norms: dict[tuple[Ranks, ...], list[torch.Tensor]] = {}
    for holder, tensor in pairs:
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(
                placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            )
        like = holder if tensor is None else tensor
        mesh = like.device_mesh if isinstance(like, DTensor) else None
        device = torch.device(mesh.device_type) if mesh is not None else like.device
        ranks: list[Ranks] = []
        for group in [*over.get(id(holder), ()), *(_sharding(like, mesh) if mesh is not None else ())]:
            members = tuple(dist.get_process_group_ranks(group))
            if len(members) > 1 and members not in ranks:
                groups.setdefault(members, (group, device))
                ranks.append(members)
        norms.setdefault(tuple(reversed(ranks)), []).append(_local_norm(tensor, norm_type, device))
    powers = {ranks: _joined(torch.stack(of_ranks), norm_type) for ranks, of_ranks in norms.items()}
    while longest := max(powers, key=len, default=()):
        group, device = groups[longest[0]]
        first = [ranks for ranks in powers if ranks[:1] == longest[:1]]
        reduced = torch.stack([powers.pop(ranks).to(device) for ranks in first])
        dist.all_reduce(reduced, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
        for (_, *last), power in zip(first, reduced, strict=True):
            rest = powers.get(tuple(last))
            powers[tuple(last)] = power if rest is None else _sum(power, rest.to(device), norm_type)
    total = powers.get(())
    if total is None:
        return torch.tensor(0.0)
    return (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).float()


def _sharding(tensor: torch.Tensor, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of ranks that have other parts of a DTensor, of the outermost dim of its mesh first."""
    assert isinstance(tensor, DTensor)
    return [mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def _local_norm(tensor: torch.Tensor | None, norm_type: float, device: torch.device) -> torch.Tensor:
    """Of this rank's elements, on the device where ranks sum."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local is None or not local.numel():
        return torch.zeros((), dtype=torch.float32, device=device)
    norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
    return norm.float().to(device)


def _joined(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Powers, which ranks sum, of norms; the largest of norms of infinity."""
    if math.isinf(norm_type):
        return norms.max()
    wide = torch.float32 if norms.device.type == "mps" else torch.float64
    return (norms.to(wide) ** norm_type).sum()


def _sum(power: torch.Tensor, other: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.maximum(power, other) if math.isinf(norm_type) else power + other


def parameter_groups(parameters: nn.Module | Iterable[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    """The weights of a module, or some of them, as groups for an optimizer: those of one mesh together, plain tensors apart.

    An optimizer of PyTorch makes the steps of a group in one call (``foreach``, the default on a GPU, and ``fused``), which takes no mixture.
    ``options``: of every group, as ``weight_decay=0.0``.
    """
    listed = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in listed:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": members, **options} for members in groups.values()]
