"""The norm of all gradients and groups for an optimizer, where some weights are DTensors, of one mesh or several, and others plain tensors.

PyTorch's own functions stack all norms in one tensor, and an optimizer calls one kernel for many weights: both raise for such a mixture
(2.13: ``got mixed torch.Tensor and DTensor``, ``All operands must have the same mesh``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwright.core.findings.errors import InputError


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for the weights of a module that ``parallelize`` has sharded. All ranks call it.

    Returns the norm of all gradients before, a plain tensor without dims, the same on every rank. Every element counts once, on however
    many ranks it is.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
    norm = total_norm(gradients, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise InputError(
            f"the norm of the gradients is {norm.item()}. Without error_if_nonfinite they would be scaled by it."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return norm


@torch.no_grad()
def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all elements of some tensors, as ``torch.nn.utils.get_total_norm``: a plain tensor, the same on every rank."""
    norm_type = float(norm_type)
    # By the mesh, and by which of its axes shard the tensor: one sum over ranks for each.
    parts: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                tensor = tensor.redistribute(
                    placements=[Replicate() if one.is_partial() else one for one in tensor.placements]
                )
            sharded = tuple(not placement.is_replicate() for placement in tensor.placements)
            parts.setdefault((tensor.device_mesh, sharded), []).append(_power(tensor.to_local(), norm_type))
        else:
            parts.setdefault(None, []).append(_power(tensor, norm_type))
    if not parts:
        return torch.tensor(0.0)
    operation = "max" if math.isinf(norm_type) else "sum"
    powers = []
    for key, of_key in parts.items():
        power = torch.stack(of_key)
        power = power.max() if operation == "max" else power.sum()
        if key is not None:
            mesh, sharded = key
            placements = [Partial(operation) if one else Replicate() for one in sharded]
            power = DTensor.from_local(power, mesh, placements, run_check=False).full_tensor()
        powers.append(power)
    total = torch.stack([power.to(powers[0].device) for power in powers])
    return total.max() if operation == "max" else total.sum() ** (1.0 / norm_type)


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    if not local.numel():
        return torch.zeros((), dtype=torch.float32, device=local.device)
    norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
    return norm.float() if math.isinf(norm_type) else norm.float() ** norm_type


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
