"""The plan, lowered: what crosses devices between two named activations, and between a weight at rest and in use.

Each crossing is carried out as the core says, step by step, in both directions: forward from one layout to the other,
backward the way back for the cotangent, which is summed over the axes on which the target was used in parts. JAX
differentiates none of the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.gradients import in_parts, partial_axes
from shardwright.core.movement import Step, steps
from shardwright.core.plan import Plan, TensorPlan
from shardwright.core.resolve import brought_once, multiplied, resolve_weight, traffic_of
from shardwright.core.spec import Spec
from shardwright.core.table import Move, Weight
from shardwright.engine_jax.layer_io import AttentionLinks, ExpertLinks, Links, index_of, size_of


def links_of(plan: Plan) -> Links:
    """What the mathematics needs of a plan, for one device among those of its mesh."""
    # Those of dispatched tokens are the experts' own.
    moves = {
        (move.source, move.target): _Crossing.of(plan, move)
        for move in plan.request.table.moves
        if move.kind not in ("dispatch", "combine")
    }
    uses = _uses(plan)

    def move(source: str, target: str, array: jax.Array) -> jax.Array:
        return moves[source, target].cross(array)

    def use(name: str, weight: jax.Array, component: str | None = None) -> jax.Array:
        return uses[name, component](weight)

    return Links(
        move=move,
        use=use,
        vocab={"embedding": _embedding_cut(plan), "logits": _cut(plan, "logits.scores", "vocab")},
        tied_once=_tied_once(plan),
        attention=_attention(plan),
        experts=_experts(plan),
    )


def late_sums(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which the gradient of a weight is left in parts until the last micro-step: its replicas."""
    gradient = plan.by_name[name].gradient
    return plan.mesh.larger_than_one(axis for axis, kind in gradient.items() if kind == "all-reduce")


def carry(array: jax.Array, way: Iterable[Step], names: Sequence[str]) -> jax.Array:
    """A device's part of an array, taken through the steps; ``names`` are the logical axes of its dims."""

    def dim(name: str | None) -> int:
        assert name is not None, way
        return names.index(name)

    for step in way:
        match step.kind:
            case "all-reduce":
                array = jax.lax.psum(array, step.axes)
            case "reduce-scatter":
                array = jax.lax.psum_scatter(array, step.axes, scatter_dimension=dim(step.target), tiled=True)
            case "all-gather":
                array = jax.lax.all_gather(array, step.axes, axis=dim(step.source), tiled=True)
            case "all-to-all":
                array = jax.lax.all_to_all(array, step.axes, dim(step.target), dim(step.source), tiled=True)
            case "slice":
                array = _own_part(array, step.axes, dim(step.target))
    return array


def _own_part(array: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    size = array.shape[dim] // size_of(axes)
    return jax.lax.dynamic_slice_in_dim(array, index_of(axes) * size, size, dim)


class _Crossing(NamedTuple):
    """A move of the table on a mesh. ``shape``: of the source's part on a device, None where the table gives none."""

    move: Move
    names: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, move: Move) -> _Crossing:
        layout, mesh = plan.request.layout, plan.mesh
        source = plan.by_name[move.source].in_use.renamed(move.renamed or {})
        target = plan.by_name[move.target].in_use
        # Groups of tokens are a row's pieces: the two dims of the plan are one of the arrays.
        names = tuple(name for name in source.logical_axes if name in target.logical_axes)
        before = Spec.build(names, {name: source.axes_of(name) for name in names})
        after = Spec.build(names, {name: target.axes_of(name) for name in names})
        sizes = dict(zip(source.logical_axes, plan.by_name[move.source].shape, strict=True))
        sizes["batch"] //= plan.request.micro_steps
        for name in {"groups", "length"} & set(names):
            sizes[name] = plan.request.length
        return cls(
            move=move,
            names=names,
            forward=steps(before, after, partial_axes(layout, move.summed), mesh),
            backward=steps(after, before, partial_axes(layout, move.feeds), mesh),
            shape=tuple(sizes[name] // mesh.size(before.axes_of(name)) for name in names),
        )

    def cross(self, array: jax.Array) -> jax.Array:
        assert array.shape == self.shape, (self.move.source, self.move.target, array.shape, self.shape)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return carry(array, self.forward, self.names)
        if not self.forward and not self.backward:
            return array

        @jax.custom_vjp
        def cross(array: jax.Array) -> jax.Array:
            return carry(array, self.forward, self.names)

        cross.defvjp(
            lambda array: (cross(array), None),
            lambda _, cotangent: (carry(cotangent, self.backward, self.names),),
        )
        return cross(array)


class _Use(NamedTuple):
    """A weight in one of its uses. ``alone``: axes on whose first device alone this use's gradient counts.

    ``taken``: from the weight as it is in use, the part that this use multiplies with, by slices.
    """

    names: tuple[str, ...]
    gathered: tuple[Step, ...]
    scattered: tuple[Step, ...]
    taken: tuple[Step, ...]
    alone: tuple[str, ...]
    dtype: str
    dtype_at_rest: str
    shape: tuple[int, ...]

    def bring(self, weight: jax.Array) -> jax.Array:
        assert weight.shape == self.shape, (self.names, weight.shape, self.shape)

        @jax.custom_vjp
        def bring(weight: jax.Array) -> jax.Array:
            # Cast before it is gathered, so that the links carry the narrower type.
            return carry(weight.astype(jnp.dtype(self.dtype)), (*self.gathered, *self.taken), self.names)

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            # Cast before it is summed: with more devices more is summed on the way, and no layout may change numbers.
            gradient = gradient.astype(jnp.dtype(self.dtype_at_rest))
            for step in reversed(self.taken):
                gradient = _in_its_place(gradient, step.axes, self.names.index(step.target or ""))
            if self.alone:
                gradient = jnp.where(index_of(self.alone) == 0, gradient, jnp.zeros_like(gradient))
            return (carry(gradient, self.scattered, self.names),)

        bring.defvjp(lambda weight: (bring(weight), None), backward)
        return bring(weight)


def _in_its_place(part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The whole dim with a device's part where it belongs, and zeros elsewhere."""
    shape = list(part.shape)
    shape[dim] *= size_of(axes)
    return jax.lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, part.dtype), part, index_of(axes) * part.shape[dim], dim
    )


def _uses(plan: Plan) -> dict[tuple[str, str | None], Callable[[jax.Array], jax.Array]]:
    rows = plan.by_name
    found = {}
    for weight in plan.request.table.weights:
        for component in (None, *weight.uses):
            found[weight.name, component] = _use(plan, weight, rows[weight.name], component).bring
    return found


def _use(plan: Plan, weight: Weight, row: TensorPlan, component: str | None) -> _Use:
    layout, mesh = plan.request.layout, plan.mesh
    assert row.at_rest is not None
    at_rest, in_use = (Spec(spec.dims[len(spec.dims) - len(row.shape) :]) for spec in (row.at_rest, row.in_use))
    if component is not None:
        in_use = resolve_weight(weight, layout, mesh, plan.request.engine, component).in_use
    in_use = multiplied(in_use, component or weight.component, layout, mesh)
    cutting = set(at_rest.axes)
    sliced = [axis for axis in in_use.axes if axis not in cutting]
    whole = in_use.without(sliced)
    gradient = {axis: kind for axis, kind in row.gradient.items() if axis in mesh.larger_than_one(mesh.names)}
    summed_here = {axis for axis, kind in gradient.items() if kind == "reduce-scatter"}
    parts = {*in_parts(weight, layout, in_use, component), *sliced}
    return _Use(
        names=at_rest.logical_axes,
        gathered=steps(at_rest, whole, (), mesh),
        taken=steps(whole, in_use, (), mesh),
        scattered=steps(whole, at_rest, summed_here, mesh),
        alone=tuple(axis for axis in gradient if axis not in parts and axis not in whole.axes),
        dtype=weight.in_use_dtype or plan.request.dtype,
        dtype_at_rest=row.dtype,
        shape=tuple(size // mesh.size(dim.axes) for size, dim in zip(row.shape, at_rest.dims, strict=True)),
    )


def _cut(plan: Plan, tensor: str, logical_axis: str) -> tuple[str, ...]:
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes_of(logical_axis))


def _embedding_cut(plan: Plan) -> tuple[str, ...]:
    in_use = multiplied(plan.by_name["embedding.tokens"].in_use, "embedding", plan.request.layout, plan.mesh)
    return plan.mesh.larger_than_one(in_use.axes_of("vocab"))


def _tied_once(plan: Plan) -> bool:
    request, weight = plan.request, plan.request.table.weight("embedding.tokens")
    return all(brought_once(weight, request.layout, plan.mesh, request.engine, use) for use in weight.uses)


def _attention(plan: Plan) -> AttentionLinks:
    keys = "attention.keys_attended"
    heads = "kv_heads" if "kv_heads" in plan.by_name[keys].in_use.logical_axes else "heads"
    travels = plan.request.layout.move_attention == "ring"
    return AttentionLinks(
        ring=_cut(plan, "attention.queries", "length") if travels else (),
        heads=_cut(plan, "attention.queries_attended", "heads"),
        kv_heads=_cut(plan, keys, heads),
    )


def _experts(plan: Plan) -> ExpertLinks:
    if "moe.dispatched" not in plan.by_name:
        return ExpertLinks()
    row = _cut(plan, "router.grouped", "groups")
    return ExpertLinks(
        axes=_cut(plan, "moe.dispatched", "experts") if plan.request.layout.move_moe != "weights" else (),
        move=plan.request.layout.move_moe,
        row=row,
        tiles=_tiles(plan.row_pieces, plan.mesh.size(row)),
        room=traffic_of(plan.request, plan.mesh).room(plan.request.expert_buffer),
    )


def _tiles(pieces: Sequence[int], groups: int) -> tuple[int, ...]:
    """The places in the text of equal pieces so small that each belongs to one group.

    >>> _tiles((0, 3, 1, 2), groups=8), _tiles((0,), groups=2), _tiles((0, 3, 1, 2), groups=1)
    ((0, 1, 6, 7, 2, 3, 4, 5), (0, 1), (0, 3, 1, 2))
    """
    parts = lcm(len(pieces), groups) // len(pieces)
    return tuple(piece * parts + part for piece in pieces for part in range(parts))
