"""The modules of what is gathered together (``core/plan/fsdp_groups.py``), one inside the other, and ``fully_shard`` of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwright.core.plan.fsdp_groups import FsdpGroup
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import Params
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import joined, sum_gradients

Compute = Callable[..., Any]


class Gathered(nn.Module):
    """Weights of one group, around what is computed with them and with those of the groups inside.

    ``fully_shard`` gathers a module's own parameters while its ``forward`` runs: so each group is a module. ``inside``: of
    the next group, or what has groups of its own and is called by ``compute``.
    ``summed_in``: where a weight has several uses, the dtype in which their gradients are summed on a rank already;
    PyTorch would sum them in that of the gathered weight.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inside: nn.Module | None,
        compute: Compute,
        summed_in: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._summed_in = summed_in
        self._names = {key: key.replace(".", "__") for key in parameters}
        for key, parameter in parameters.items():
            self.register_parameter(self._names[key], parameter)
        self.inside = inside
        self._compute = compute

    def own(self) -> dict[str, torch.Tensor]:
        """The group's weights: whole while ``forward`` runs, the rank's own parts otherwise."""
        return {key: getattr(self, name) for key, name in self._names.items()}

    def forward(self, *arguments: Any, around: Callable[[], Params] | None = None) -> Any:
        if self._summed_in is not None:
            for one in self.own().values():
                one.grad_dtype = self._summed_in  # pyright: ignore[reportAttributeAccessIssue]

        def held() -> Params:
            return {**(around() if around else {}), **self.own()}

        if isinstance(self.inside, Gathered):
            return self.inside(*arguments, around=held)
        return self._compute(held(), *arguments)


def build(
    groups: Sequence[FsdpGroup],
    parameters: Mapping[str, nn.Parameter],
    compute: Compute,
    ranks: Ranks,
    *,
    again: bool,
    called: nn.Module | None = None,
) -> Gathered:
    """Modules of the groups, one inside the other in any order, around ``compute(weights, *arguments)``.

    Those of axes are cut by ``fully_shard``. ``again``: gathered anew for the backward pass. ``called``: what ``compute``
    calls that has groups of its own.
    """
    inside: nn.Module | None = called
    for group in groups:
        own = {one.key: parameters[one.key] for one in group.weights}
        tied = group.axes and any(one.num_uses > 1 for one in group.weights)
        inside = Gathered(own, inside, compute, torch_dtype(group.weights[0].reduce_dtype) if tied else None)
        if group.axes:
            _shard(inside, group, ranks, again=again)
    assert isinstance(inside, Gathered)
    return inside


def _shard(module: Gathered, group: FsdpGroup, ranks: Ranks, *, again: bool) -> None:
    mesh = ranks.submesh(group.axes)
    if group.replicas:
        mesh = joined([ranks.submesh(group.replicas), mesh])
    first, own = group.weights[0], set(module.own().values())
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=again,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch_dtype(first.gather_dtype),
            reduce_dtype=torch_dtype(first.reduce_dtype),
            cast_forward_inputs=False,
        ),
        # It would take in what rests whole in the modules inside.
        ignored_params={one for one in module.parameters() if one not in own},  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(sharded, FSDPModule)
    sum_gradients(sharded)
