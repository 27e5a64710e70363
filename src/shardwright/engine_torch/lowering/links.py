"""The plan, lowered: what crosses ranks between two named activations, and between a weight gathered and in use.

Each crossing is carried out as the core says, step by step, in both directions: forward from one layout to the other,
backward the way back for the slope, which is summed over the axes on which the target was used in parts. Autograd
differentiates none of the collectives. Weights come gathered over the axes that only store them (``gathering.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import in_use_dtype
from shardwright.core.model.table import Move
from shardwright.core.plan.movement import Step, steps
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import resharding, weight_reshardings
from shardwright.core.resolution.resolve import expert_axes, traffic_of
from shardwright.core.resolution.row_order import tiles
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import ALONE, AttentionLinks, ExpertLinks, Links
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.redistribute import in_its_place, own_shard, redistribute
from shardwright.engine_torch.io.scopes import moving


def links_of(plan: Plan, ranks: Ranks) -> Links:
    """What the mathematics needs of a plan, for one rank among those of its mesh."""
    # Those of dispatched tokens are the experts' own.
    moves = {
        (move.source, move.target): _Resharding.of(plan, move, ranks)
        for move in plan.request.table.moves
        if move.kind not in ("dispatch", "combine")
    }
    uses = {
        (weight.name, None if component == weight.component else component): _Use.of(
            plan, weight.name, component, ranks
        )
        for weight in plan.request.table.weights
        for component in (weight.component, *weight.uses)
    }
    embedding = weight_reshardings(plan.request, plan.mesh, plan.by_name["embedding.tokens"])

    def move(source: str, target: str, array: torch.Tensor) -> torch.Tensor:
        return moves[source, target].reshard(array)

    def use(name: str, weight: torch.Tensor, component: str | None = None) -> torch.Tensor:
        return uses[name, component].bring(weight)

    return Links(
        move=move,
        use=use,
        vocab={
            "embedding": ranks.peers(embedding["embedding"].operand.axes_of("vocab")),
            "logits": ranks.peers(_sharding_axes(plan, "logits.scores", "vocab")),
        },
        attention=_attention(plan, ranks),
        experts=_experts(plan, ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resharding:
    """A move of the table on a mesh. ``shape``: of the source's part on a rank."""

    component: str
    source: str
    target: str
    dims: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    shape: tuple[int, ...]
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, move: Move, ranks: Ranks) -> _Resharding:
        mesh, way = plan.mesh, resharding(plan.request, plan.by_name, move)
        return cls(
            component=way.component,
            source=move.source,
            target=move.target,
            dims=way.before.logical_axes,
            forward=way.forward(mesh),
            backward=way.backward(mesh),
            shape=_shard_shape(way.before, way.shape.values(), mesh),
            ranks=ranks,
        )

    def reshard(self, array: torch.Tensor) -> torch.Tensor:
        assert tuple(array.shape) == self.shape, (self.source, self.target, tuple(array.shape), self.shape)
        if not array.is_floating_point():
            return self.there(array)
        if not self.forward and not self.backward:
            return array
        return _Taken.apply(array, self)  # pyright: ignore[reportReturnType]

    def there(self, array: torch.Tensor) -> torch.Tensor:
        with moving(self.component, self.target):
            return redistribute(array, self.forward, self.dims, self.ranks)

    def back(self, cotangent: torch.Tensor) -> torch.Tensor:
        with moving(self.component, self.source):
            return redistribute(cotangent, self.backward, self.dims, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A weight in one of its uses: of the one that is gathered a rank takes its slice, in the dtype of the use.

    ``counts``: whether this rank's gradient does, where several make the same one and it is summed.
    """

    dims: tuple[str, ...]
    taken: tuple[Step, ...]
    counts: bool
    dtype: torch.dtype
    summed_in: torch.dtype
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, name: str, component: str, ranks: Ranks) -> _Use:
        weight, way = (
            plan.request.table.weight(name),
            weight_reshardings(plan.request, plan.mesh, plan.by_name[name])[component],
        )
        return cls(
            dims=way.gathered.logical_axes,
            taken=steps(way.gathered, way.operand, (), plan.mesh),
            counts=all(plan.mesh.coordinates(ranks.rank)[axis] == 0 for axis in way.replicated_gradient),
            dtype=torch_dtype(in_use_dtype(weight, plan.request.dtype)),
            summed_in=torch_dtype(way.reduce_dtype),
            ranks=ranks,
        )

    def bring(self, weight: torch.Tensor) -> torch.Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return _Taken.apply(local, self)  # pyright: ignore[reportReturnType]

    def there(self, weight: torch.Tensor) -> torch.Tensor:
        for dim, peers in self._slices():
            weight = own_shard(weight, dim, peers)
        return weight.to(self.dtype)

    def back(self, cotangent: torch.Tensor) -> torch.Tensor:
        # Cast before it is summed, with that of another use and over ranks.
        cotangent = cotangent.to(self.summed_in)
        for dim, peers in self._slices():
            cotangent = in_its_place(cotangent, dim, peers)
        # Zeros, and not none at all: every rank is in its sums.
        return cotangent if self.counts else torch.zeros_like(cotangent)

    def _slices(self) -> list[tuple[int, Peers]]:
        """Of each dim that is cut in use, one; their order says nothing."""
        assert all(step.kind == "slice" for step in self.taken), self.taken
        return [(self.dims.index(step.target or ""), self.ranks.peers(step.axes)) for step in self.taken]


class _Reshard(Protocol):
    """There, and the way back of the slope."""

    def there(self, tensor: torch.Tensor, /) -> torch.Tensor: ...

    def back(self, cotangent: torch.Tensor, /) -> torch.Tensor: ...


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, way: _Reshard) -> torch.Tensor:
        ctx.way = way
        moved = way.there(tensor)
        # Autograd wants a tensor of its own, and what only changes on the way back is the same one.
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        way: _Reshard = ctx.way
        return way.back(cotangents[0]), None


def _shard_shape(spec: Spec, shape: Iterable[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a rank's part."""
    return tuple(size // mesh.size(dim.axes) for size, dim in zip(shape, spec.dims, strict=True))


def _sharding_axes(plan: Plan, tensor: str, logical_axis: str) -> tuple[str, ...]:
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes_of(logical_axis))


def _attention(plan: Plan, ranks: Ranks) -> AttentionLinks:
    keys = "attention.keys_attended"
    names = plan.by_name[keys].in_use.logical_axes if keys in plan.by_name else ()
    heads = _sharding_axes(plan, "attention.queries_attended", "heads")
    kv_heads = _sharding_axes(plan, keys, "kv_heads" if "kv_heads" in names else "heads") if names else heads
    assert kv_heads == heads[: len(kv_heads)], (kv_heads, heads)
    travels = plan.request.layout.move_attention == "ring"
    return AttentionLinks(
        ring=ranks.peers(_sharding_axes(plan, "attention.queries", "length")) if travels else ALONE,
        heads=ranks.peers(heads),
        kv_heads=ranks.peers(kv_heads),
        without=ranks.peers(heads[len(kv_heads) :]),
        pieces=plan.row_chunks,
    )


def _experts(plan: Plan, ranks: Ranks) -> ExpertLinks:
    if "moe.dispatched" not in plan.by_name:
        return ExpertLinks()
    row, buffer = _sharding_axes(plan, "router.grouped", "groups"), plan.request.expert_buffer
    traffic = traffic_of(plan.request, plan.mesh)
    return ExpertLinks(
        peers=ranks.peers(expert_axes(plan.request.layout, plan.mesh)),
        around=plan.request.layout.move_moe == "ring",
        row=ranks.peers(row),
        tiles=tiles(plan.row_chunks, plan.mesh.size(row)),
        capacity=traffic.capacity,
        # PyTorch takes as many rows as come.
        buffer_rows=None if buffer is None else traffic.buffer_rows(buffer),
    )
