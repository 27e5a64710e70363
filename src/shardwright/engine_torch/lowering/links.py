"""The plan, lowered: the collectives between two named activations, and between a gathered weight and one in use.

The core gives the steps of each resharding in both passes. The forward pass reshards the activation. The backward pass reshards
the cotangent, and sums it over the axes over which it is partial. Autograd differentiates none of the collectives.
``gathering.py`` gathers weights over the axes that only store them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import in_use_dtype
from shardwright.core.model.table import Move
from shardwright.core.plan.movement import ReshardStep, reshard_steps
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import resharding, weight_reshardings
from shardwright.core.policies.policy import INPUT
from shardwright.core.program.dims import LETTERS
from shardwright.core.program.primitives import Embed
from shardwright.core.program.program import Step, Value
from shardwright.core.program.walk import AttentionGroup, ExpertGroup, LossGroup
from shardwright.core.quantization.delayed import names_by_place
from shardwright.core.quantization.dispatch import sent_rows
from shardwright.core.quantization.elements import elements_of
from shardwright.core.recipes.kernels import Device
from shardwright.core.resolution.resolve import traffic_of
from shardwright.core.resolution.row_order import tiles
from shardwright.core.resolution.token_hops import token_hops
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import ALONE, AttentionLinks, ExpertLinks, Links, LowPrecision
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.io.redistribute import own_shard, redistribute, zero_padded
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.precision.coded import Coded, carrier_of
from shardwright.engine_torch.precision.kernels import product_device
from shardwright.models.layers.decoder import walk_of


def links_of(plan: Plan, ranks: Ranks, microbatches: int, *, split: bool, products_on: Device | None = None) -> Links:
    """What the mathematics needs of a plan, on one rank of its mesh. ``microbatches``: of a step, of which the plan of a stage has one;
    ``split``: the backward pass is made in halves; ``products_on``: what multiplies codes, if not the rank's device."""
    # The experts move dispatched tokens themselves.
    moves = {
        (move.source, move.target): _Resharding.of(plan, move, ranks)
        for move in plan.request.table.moves
        if move.kind not in ("dispatch", "combine")
    }
    uses = {
        (weight.name, component): _Use.of(plan, weight.name, component, ranks)
        for weight in plan.request.table.weights
        for component in (weight.component, *weight.uses)
    }
    own = {weight.name: weight.component for weight in plan.request.table.weights}
    walk = walk_of(plan.request.table.architecture)
    (embedding,) = (step for step in walk.before if isinstance(step, Step) and isinstance(step.does, Embed))
    scores = walk.groups(LossGroup)[0].product.output
    by_component = {
        embedding.output.component: _embedding_axes(plan, embedding),
        scores.component: _sharding_axes(plan, scores, "V"),
    }

    def move(source: str, target: str, array: torch.Tensor) -> torch.Tensor:
        moved = moves[source, target].reshard(array)
        return moved if target == INPUT else named(moved, target)

    def use(name: str, weight: Any, component: str | None = None) -> Any:
        return uses[name, component or own[name]].into_use(weight)

    return Links(
        move=move,
        use=use,
        dtype=torch_dtype(plan.request.dtype),
        vocab={component: ranks.peers(axes) for component, axes in by_component.items()},
        entries=(plan.by_name[scores.row].unpadded or (None,))[-1] if scores.row in plan.by_name else None,
        loss_chunks=plan.request.loss_chunks,
        attention=_attention(plan, ranks, walk.groups(AttentionGroup)[0]),
        experts=_experts(plan, ranks, walk.groups(ExpertGroup)),
        low=_low(plan, ranks, microbatches, products_on or product_device(ranks.device.type), split=split),
        split=split,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resharding:
    """A move of the table on a mesh. ``shape``: of the source's local shard."""

    component: str
    source: str
    target: str
    dims: tuple[str, ...]
    forward: tuple[ReshardStep, ...]
    backward: tuple[ReshardStep, ...]
    shape: tuple[int, ...]
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, move: Move, ranks: Ranks) -> _Resharding:
        mesh, planned = plan.mesh, resharding(plan.request, plan.by_name, move)
        return cls(
            component=planned.component,
            source=move.source,
            target=move.target,
            dims=planned.before.logical_axes,
            forward=planned.forward(mesh),
            backward=planned.backward(mesh),
            shape=_shard_shape(planned.before, planned.shape.values(), mesh),
            ranks=ranks,
        )

    def reshard(self, array: torch.Tensor) -> torch.Tensor:
        assert tuple(array.shape) == self.shape, (self.source, self.target, tuple(array.shape), self.shape)
        if not array.is_floating_point():
            return self.run_forward(array)
        if not self.forward and not self.backward:
            return array
        return _WithBackward.apply(array, self)  # pyright: ignore[reportReturnType]

    def run_forward(self, array: torch.Tensor) -> torch.Tensor:
        with moving(self.component, self.target):
            return redistribute(array, self.forward, self.dims, self.ranks)

    def run_backward(self, cotangent: torch.Tensor) -> torch.Tensor:
        with moving(self.component, self.source):
            return redistribute(cotangent, self.backward, self.dims, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A weight in one of its uses: a rank takes its slice of the gathered weight, in the dtype of the use.

    ``counts``: whether this rank's gradient counts, where several ranks make the same one and it is summed.
    """

    dims: tuple[str, ...]
    sliced: tuple[ReshardStep, ...]
    counts: bool
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, name: str, component: str, ranks: Ranks) -> _Use:
        weight = plan.request.table.weight(name)
        planned = weight_reshardings(plan.request, plan.mesh, plan.by_name[name])[component]
        return cls(
            dims=planned.gathered.logical_axes,
            sliced=reshard_steps(planned.gathered, planned.operand, (), plan.mesh),
            counts=all(plan.mesh.coordinates(ranks.rank)[axis] == 0 for axis in planned.replicated_gradient),
            dtype=torch_dtype(in_use_dtype(weight, plan.request.dtype)),
            reduce_dtype=torch_dtype(planned.reduce_dtype),
            ranks=ranks,
        )

    def into_use(self, weight: torch.Tensor | Coded) -> torch.Tensor | Coded:
        if isinstance(weight, Coded):
            return replace(weight, carrier=_WithBackward.apply(carrier_of(weight), self))
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if not self.sliced and self.counts and local.dtype == self.dtype == self.reduce_dtype:
            return local
        return _WithBackward.apply(local, self)  # pyright: ignore[reportReturnType]

    def run_forward(self, weight: torch.Tensor) -> torch.Tensor:
        for dim, peers in self._slices():
            weight = own_shard(weight, dim, peers)
        return weight.to(self.dtype)

    def run_backward(self, cotangent: torch.Tensor) -> torch.Tensor:
        # Cast before it is summed with the gradient of another use and over ranks.
        cotangent = cotangent.to(self.reduce_dtype)
        for dim, peers in self._slices():
            cotangent = zero_padded(cotangent, dim, peers)
        # Zeros, not None: every rank takes part in the sums.
        return cotangent if self.counts else torch.zeros_like(cotangent)

    def _slices(self) -> list[tuple[int, Peers]]:
        """One slice for each dim that is sharded in use; their order does not matter."""
        assert all(step.kind == "slice" for step in self.sliced), self.sliced
        return [(self.dims.index(step.target or ""), self.ranks.peers(step.axes)) for step in self.sliced]


class _Passes(Protocol):
    """A forward pass, and the backward pass of the cotangent."""

    def run_forward(self, tensor: torch.Tensor, /) -> torch.Tensor: ...

    def run_backward(self, cotangent: torch.Tensor, /) -> torch.Tensor: ...


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, passes: _Passes) -> torch.Tensor:
        ctx.passes = passes
        result = passes.run_forward(tensor)
        # Autograd needs a new tensor, and a forward pass without steps returns its input.
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        passes: _Passes = ctx.passes
        return passes.run_backward(cotangents[0]), None


def _low(plan: Plan, ranks: Ranks, microbatches: int, device: Device, *, split: bool) -> dict[str, LowPrecision]:
    scales = plan.delayed
    return {
        weight.name: LowPrecision(
            quantizers={(one.product, one.operand): one.quantizer for one in weight.operands},
            name=weight.name,
            num_layers=weight.num,
            component=weight.component,
            amax_peers={(one.product, one.operand): ranks.peers(one.reduced) for one in weight.operands},
            same_amax={(one.product, one.operand): one.same_amax for one in weight.operands},
            delayed=names_by_place(weight, scales),
            elements=elements_of(weight, plan.mesh, plan.row_chunks, microbatches),
            here=ranks.place_over,
            kernels={
                product: one.name for product, one in weight.kernels_on(device, "torch", plan.request.dtype).items()
            },
            split=split,
        )
        for weight in plan.quantized
    }


def _shard_shape(spec: Spec, shape: Iterable[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a local shard."""
    return tuple(size // mesh.size(dim.axes) for size, dim in zip(shape, spec.dims, strict=True))


def _sharding_axes(plan: Plan, value: Value, dim: str) -> tuple[str, ...]:
    """None of a value that a stage has not."""
    if value.row not in plan.by_name:
        return ()
    return plan.mesh.larger_than_one(plan.by_name[value.row].in_use.axes_of(LETTERS[dim]))


def _embedding_axes(plan: Plan, embed: Step) -> tuple[str, ...]:
    """The axes that shard the vocabulary of the embedding's weight in use; none in a stage without the embedding."""
    if embed.inputs[0].row not in plan.by_name:
        return ()
    (use,) = embed.weights
    planned = weight_reshardings(plan.request, plan.mesh, plan.by_name[use.name])[use.component]
    return planned.operand.axes_of(use.logical_axes[0])


def _attention(plan: Plan, ranks: Ranks, group: AttentionGroup) -> AttentionLinks:
    heads, kv_heads = (_sharding_axes(plan, value, value.dims[2]) for value in (group.queries, group.keys))
    assert kv_heads == heads[: len(kv_heads)], (kv_heads, heads)
    has_ring = plan.request.layout.move_attention == "ring"
    return AttentionLinks(
        ring=ranks.peers(_sharding_axes(plan, group.takes[0].inputs[0], "L")) if has_ring else ALONE,
        heads=ranks.peers(heads),
        kv_heads=ranks.peers(kv_heads),
        kv_replicas=ranks.peers(heads[len(kv_heads) :]),
        chunks=plan.row_chunks,
    )


def _experts(plan: Plan, ranks: Ranks, groups: Sequence[ExpertGroup]) -> ExpertLinks:
    if not groups or groups[0].sent.output.row not in plan.by_name:
        return ExpertLinks()
    row, buffer = _sharding_axes(plan, groups[0].tokens, "G"), plan.request.expert_buffer
    traffic, (*before, last) = traffic_of(plan.request, plan.mesh), token_hops(plan.request, plan.mesh)
    return ExpertLinks(
        peers=ranks.peers(last.axes),
        nodes=ranks.peers(before[0].axes) if before else ALONE,
        even_tokens=before[0].even_rows if before else 0,
        even_rows=last.even_rows if before else None,
        ring=plan.request.layout.move_moe == "ring",
        row=ranks.peers(row),
        tiles=tiles(plan.row_chunks, plan.mesh.size(row)),
        capacity=traffic.capacity,
        # Without a given size, PyTorch's buffer has as many rows as the rank receives.
        buffer_rows=None if buffer is None else traffic.buffer_rows(buffer),
        sent=sent_rows(plan.request.precision, plan.request.table.names),
    )
