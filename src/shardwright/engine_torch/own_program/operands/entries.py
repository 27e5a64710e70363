"""Which modules of a user's own program convert their inputs and outputs: those with weights that are DTensors in use, the modules that
contain them, and the entire one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.plan.fsdp_groups import WeightOfLayer
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.own_program.operands.conversions import Converter

Axes = tuple[str, ...]


def sharding_axes(weights: Mapping[str, WeightOfLayer], plan: Plan) -> Axes:
    """The axes that shard weights in use and whose ranks have the same tokens, in mesh order."""
    used = {axis for weight in weights.values() for axis in weight.in_use.axes}
    return plan.mesh.larger_than_one(axis for axis in plan.mesh.names if axis in used and axis not in plan.loss_axes)


def convert_activations(module: nn.Module, weights: Mapping[str, WeightOfLayer], plan: Plan, mesh: DeviceMesh) -> None:
    """Have each module convert its inputs and outputs. ``mesh``: of the plan. A module whose weights are sharded over ranks that have
    different tokens, or by experts, is left as it is: it sends tokens itself."""
    axes = sharding_axes(weights, plan)
    if not axes:
        return
    weights = _by_every_name(module, weights)
    inside = {path for path, owner in module.named_modules() if _sends_tokens(path, owner, weights, plan)}
    for path, owner in module.named_modules():
        if path in inside:
            continue
        below = [weights[name] for name in _names_below(path, owner) if name in weights]
        if not below and path:
            continue
        read = ("", "out_proj") if isinstance(owner, nn.MultiheadAttention) else ("",)
        multiplied = [
            weights[name]
            for part in read
            for name in _own_names(f"{path}.{part}".strip("."), owner.get_submodule(part))
            if name in weights
        ]
        Converter(
            mesh=mesh[axes],
            owners=read if multiplied else (),
            sharded=any(weight.in_use.axes for weight in multiplied),
            gathers=any(weight.component in OUTSIDE_LAYERS for weight in multiplied),
            whole=not path,
        ).install(owner)


def _by_every_name(module: nn.Module, weights: Mapping[str, WeightOfLayer]) -> Mapping[str, WeightOfLayer]:
    """The weights also by the other names of those that modules share."""
    firsts = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: weights[firsts[parameter]] for name, parameter in every if firsts[parameter] in weights}


def _sends_tokens(path: str, owner: nn.Module, weights: Mapping[str, WeightOfLayer], plan: Plan) -> bool:
    return any(
        axis in plan.loss_axes or dim.logical_axis == "experts"
        for name in _own_names(path, owner)
        if name in weights
        for dim in weights[name].in_use.dims
        for axis in dim.axes
    )


def _own_names(path: str, owner: nn.Module) -> Iterator[str]:
    for name, _ in owner.named_parameters(recurse=False):
        yield f"{path}.{name}" if path else name


def _names_below(path: str, owner: nn.Module) -> Iterator[str]:
    for name, _ in owner.named_parameters():
        yield f"{path}.{name}" if path else name
