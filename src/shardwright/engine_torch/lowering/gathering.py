"""A module for each FSDP parameter group (``core/plan/fsdp_groups.py``), one inside the other, and ``fully_shard`` of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardwright.core.plan.fsdp_groups import FsdpGroup
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import Params
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import joined, mesh_of, sum_gradients

Compute = Callable[..., Any]


class Gathered(nn.Module):
    """The module of one FSDP parameter group; its ``forward`` calls ``compute`` with its weights and those of the groups inside.

    ``fully_shard`` gathers a module's own parameters while its ``forward`` runs, so each group is a module. ``inside``: the
    module of the next group, or the module with its own groups that ``compute`` calls.
    ``reduce_dtype``: for a weight with several uses, or whose gradients are summed in another dtype than its own, the dtype in which a
    rank sums gradients; PyTorch would sum them in the dtype of the gathered weight.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inside: nn.Module | None,
        compute: Compute,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._reduce_dtype = reduce_dtype
        self._names = {key: key.replace(".", "__") for key in parameters}
        for key, parameter in parameters.items():
            self.register_parameter(self._names[key], parameter)
        self.inside = inside
        self._compute = compute

    def own(self) -> dict[str, torch.Tensor]:
        """The group's weights: gathered while ``forward`` runs, local shards otherwise."""
        return {key: getattr(self, name) for key, name in self._names.items()}

    def hold_no_values(self, keys: AbstractSet[str]) -> None:
        """Free the memory of those of its weights: what is left of each has its shape and dtype, and gets its gradient."""
        for key in keys & self._names.keys():
            weight = getattr(self, self._names[key])
            one = torch.zeros((), dtype=weight.dtype, device=weight.device)
            self.register_parameter(self._names[key], nn.Parameter(one.expand(weight.shape)))

    def forward(self, *arguments: Any, outer: Callable[[], Params] | None = None) -> Any:
        if self._reduce_dtype is not None:
            for one in self.own().values():
                one.grad_dtype = self._reduce_dtype  # pyright: ignore[reportAttributeAccessIssue]

        def weights() -> Params:
            return {**(outer() if outer else {}), **self.own()}

        if isinstance(self.inside, Gathered):
            return self.inside(*arguments, outer=weights)
        return self._compute(weights(), *arguments)


def build(
    groups: Sequence[FsdpGroup],
    parameters: Mapping[str, nn.Parameter],
    compute: Compute,
    ranks: Ranks,
    *,
    reshard_after_forward: bool,
    called: nn.Module | None = None,
) -> Gathered:
    """Modules of the groups, one inside the other in any order; the innermost calls ``compute(weights, *arguments)``.

    ``fully_shard`` shards the groups that have axes, but for those of which ``compute`` gathers codes. ``reshard_after_forward``: free gathered weights after the forward pass, and
    gather them again for the backward pass, but for groups that stay gathered. ``called``: a module with its own groups that ``compute`` calls.
    """
    inside: nn.Module | None = called if groups else Gathered({}, called, compute)
    for group in groups:
        own = {one.key: parameters[one.key] for one in group.weights}
        first = group.weights[0]
        tied = group.axes and any(one.num_uses > 1 for one in group.weights)
        sums_apart = tied or first.reduce_dtype != first.dtype
        inside = Gathered(own, inside, compute, torch_dtype(first.reduce_dtype) if sums_apart else None)
        if group.axes and not group.of_codes:
            _shard(inside, group, ranks, reshard_after_forward=reshard_after_forward and not group.kept)
    assert isinstance(inside, Gathered)
    if called is not None:
        _join(inside, called)
    return inside


def _join(outermost: Gathered, called: nn.Module) -> None:
    """Have ``fully_shard`` manage a module around those that are called, if it manages none: otherwise each would be gathered and
    reduced by itself, and none while another is computed."""
    around: nn.Module | None = outermost
    while isinstance(around, Gathered):
        if isinstance(around, FSDPModule):
            return
        around = around.inside
    managed = next((module for module in called.modules() if isinstance(module, FSDPModule)), None)
    if managed is not None:
        # It has no weights of its own to gather, so any mesh will do.
        fully_shard(outermost, mesh=mesh_of(managed), ignored_params=set(outermost.parameters()))


def _shard(module: Gathered, group: FsdpGroup, ranks: Ranks, *, reshard_after_forward: bool) -> None:
    mesh = ranks.submesh(group.axes)
    if group.replicas:
        mesh = joined([ranks.submesh(group.replicas), mesh])
    first, own = group.weights[0], set(module.own().values())
    shards = {
        id(parameter): Shard(one.storage_dim)
        for one, parameter in zip(group.weights, module.own().values(), strict=True)
    }
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda parameter: shards[id(parameter)],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch_dtype(first.gather_dtype),
            reduce_dtype=torch_dtype(first.reduce_dtype),
            cast_forward_inputs=False,
        ),
        # It would also shard the parameters in the modules inside that are replicated at rest.
        ignored_params={one for one in module.parameters() if one not in own},  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(sharded, FSDPModule)
    sum_gradients(sharded)
