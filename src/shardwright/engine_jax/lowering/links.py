"""The plan, lowered: what crosses devices between two named activations, and between a weight at rest and in use.

Each crossing is carried out as the core says, step by step, in both directions: forward from one layout to the other,
backward the way back for the cotangent, which is summed over the axes on which the target was used in parts. JAX
differentiates none of the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import in_use_dtype
from shardwright.core.model.table import Move, Weight
from shardwright.core.plan.attention_kernels import Backend, choose_attention, local_attention
from shardwright.core.plan.expert_kernels import choose_expert_kernel
from shardwright.core.plan.movement import Step, hopped, steps
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import WeightResharding, resharding, weight_reshardings
from shardwright.core.resolution.resolve import expert_axes, traffic_of
from shardwright.core.resolution.row_order import tiles
from shardwright.engine_jax.io.layer_io import Around, AttentionLinks, ExpertLinks, Links, Ring, index_of, size_of
from shardwright.engine_jax.io.redistribute import redistribute
from shardwright.engine_jax.io.scopes import of_component, of_tensor


def links_of(plan: Plan, backend: Backend = "cpu") -> Links:
    """What the mathematics needs of a plan, for one device among those of its mesh; ``backend``: what they are."""
    # Those of dispatched tokens are the experts' own.
    moves = {
        (move.source, move.target): _Resharding.of(plan, move)
        for move in plan.request.table.moves
        if move.kind not in ("dispatch", "combine")
    }
    uses = _uses(plan)
    embedding = weight_reshardings(plan.request, plan.mesh, plan.by_name["embedding.tokens"])

    def move(source: str, target: str, array: jax.Array) -> jax.Array:
        resharding = moves[source, target]
        with of_component(resharding.component), of_tensor(target):
            return resharding.reshard(array)

    def use(name: str, weight: jax.Array, component: str | None = None) -> jax.Array:
        with of_component(component or plan.by_name[name].component), of_tensor(name):
            (brought,) = uses[name, component](weight)
        return brought

    def use_twice(name: str, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        with of_component(plan.by_name[name].component), of_tensor(name):
            first, second = uses[name, None](weight, times=2)
        return first, second

    return Links(
        move=move,
        use=use,
        use_twice=use_twice,
        vocab={
            "embedding": plan.mesh.larger_than_one(embedding["embedding"].operand.axes_of("vocab")),
            "logits": _sharding_axes(plan, "logits.scores", "vocab"),
        },
        tied_once=len(set(embedding.values())) == 1,
        attention=_attention(plan, backend),
        experts=_experts(plan, backend),
    )


def late_sums(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which the gradient of a weight is left in parts until the last microbatch: its replicas."""
    gradient = plan.by_name[name].gradient
    return plan.mesh.larger_than_one(axis for axis, kind in gradient.items() if kind == "all-reduce")


class _Resharding(NamedTuple):
    """A move of the table on a mesh. ``shape``: of the source's part on a device, None where the table gives none."""

    move: Move
    component: str
    names: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, move: Move) -> _Resharding:
        mesh, way = plan.mesh, resharding(plan.request, plan.by_name, move)
        return cls(
            move=move,
            component=way.component,
            names=way.before.logical_axes,
            forward=way.forward(mesh),
            backward=way.backward(mesh),
            shape=_shard_shape(way.before, way.shape.values(), mesh),
        )

    def reshard(self, array: jax.Array) -> jax.Array:
        assert array.shape == self.shape, (self.move.source, self.move.target, array.shape, self.shape)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return redistribute(array, self.forward, self.names)
        if not self.forward and not self.backward:
            return array

        @jax.custom_vjp
        def reshard(array: jax.Array) -> jax.Array:
            return redistribute(_in_order(array), self.forward, self.names)

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            with of_tensor(self.move.source):
                return (_in_order(redistribute(cotangent, self.backward, self.names)),)

        reshard.defvjp(lambda array: (reshard(array), None), backward)
        return reshard(array)


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
    gathered_in: str
    summed_in: str
    shape: tuple[int, ...]

    def bring(self, weight: jax.Array, times: int = 1) -> tuple[jax.Array, ...]:
        """The weight, once for each of the times that it is used so."""
        assert weight.shape == self.shape, (self.names, weight.shape, self.shape)

        @jax.custom_vjp
        def bring(weight: jax.Array) -> tuple[jax.Array, ...]:
            narrow = _in_order(weight).astype(jnp.dtype(self.gathered_in))
            return (
                redistribute(narrow, (*self.gathered, *self.taken), self.names).astype(jnp.dtype(self.dtype)),
            ) * times

        def backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
            # Cast before they are summed: with more devices more is summed on the way, and no layout may change numbers.
            first, *others = (gradient.astype(jnp.dtype(self.summed_in)) for gradient in gradients)
            gradient = sum(others, first)
            for step in reversed(self.taken):
                gradient = _in_its_place(gradient, step.axes, self.names.index(step.target or ""))
            if self.alone:
                gradient = jnp.where(index_of(self.alone) == 0, gradient, jnp.zeros_like(gradient))
            gradient = redistribute(gradient, self.scattered, self.names)
            return (_in_order(gradient.astype(jnp.dtype(self.dtype_at_rest))),)

        bring.defvjp(lambda weight: (bring(weight), None), backward)
        return bring(weight)


def _in_order(array: jax.Array) -> jax.Array:
    """The array with its dims in memory as they are written, the last one fastest.

    A compiler puts the dim that a collective gathers or scatters first in memory, and carries that through the loop over
    layers: all layers' weights, and all their gradients, then lie twice, in two orders. Held to one order on either
    side, it turns one layer at a time.
    """
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _in_its_place(part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The whole dim with a device's part where it belongs, and zeros elsewhere."""
    shape = list(part.shape)
    shape[dim] *= size_of(axes)
    return jax.lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, part.dtype), part, index_of(axes) * part.shape[dim], dim
    )


def _uses(plan: Plan) -> dict[tuple[str, str | None], Callable[..., tuple[jax.Array, ...]]]:
    rows = plan.by_name
    found = {}
    for weight in plan.request.table.weights:
        for component, way in weight_reshardings(plan.request, plan.mesh, rows[weight.name]).items():
            second = None if component == weight.component else component
            found[weight.name, second] = _use(plan, weight, rows[weight.name], way).bring
    return found


def _use(plan: Plan, weight: Weight, row: TensorPlan, way: WeightResharding) -> _Use:
    mesh = plan.mesh
    return _Use(
        names=way.at_rest.logical_axes,
        gathered=steps(way.at_rest, way.gathered, (), mesh),
        taken=steps(way.gathered, way.operand, (), mesh),
        scattered=steps(way.gathered, way.at_rest, way.scattered, mesh),
        alone=way.replicated_gradient,
        dtype=in_use_dtype(weight, plan.request.dtype),
        dtype_at_rest=row.dtype,
        gathered_in=way.gather_dtype,
        summed_in=way.reduce_dtype,
        shape=_shard_shape(way.at_rest, row.shape, mesh),
    )


def _shard_shape(spec: Spec, shape: Iterable[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a device's part."""
    return tuple(size // mesh.size(dim.axes) for size, dim in zip(shape, spec.dims, strict=True))


def _sharding_axes(plan: Plan, tensor: str, logical_axis: str) -> tuple[str, ...]:
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes_of(logical_axis))


def _attention(plan: Plan, backend: Backend) -> AttentionLinks:
    keys = "attention.keys_attended"
    heads = "kv_heads" if "kv_heads" in plan.by_name[keys].in_use.logical_axes else "heads"
    length = _sharding_axes(plan, "attention.queries", "length")
    travels = plan.request.layout.move_attention == "ring" and length
    attending = local_attention(plan)
    assert attending is not None, plan.request.table.name
    return AttentionLinks(
        ring=Ring.over(plan.mesh, length) if travels else None,
        heads=_sharding_axes(plan, "attention.queries_attended", "heads"),
        kv_heads=_sharding_axes(plan, keys, heads),
        way=choose_attention(backend, attending),
        pieces=plan.row_chunks,
    )


def _experts(plan: Plan, backend: Backend) -> ExpertLinks | None:
    if "moe.dispatched" not in plan.by_name:
        return None
    traffic = traffic_of(plan.request, plan.mesh)
    buffer_rows = traffic.buffer_rows(plan.request.expert_buffer)
    row, axes = _sharding_axes(plan, "router.grouped", "groups"), expert_axes(plan.request.layout, plan.mesh)
    return ExpertLinks(
        axes=axes,
        around=_around(axes, plan.mesh) if axes and plan.request.layout.move_moe == "ring" else None,
        row=row,
        tiles=tiles(plan.row_chunks, plan.mesh.size(row)),
        traffic=traffic,
        buffer_rows=buffer_rows,
        products=choose_expert_kernel(
            backend, buffer_rows=buffer_rows, experts=traffic.experts, dtype=plan.by_name["moe.dispatched"].dtype
        ),
    )


def _around(axes: tuple[str, ...], mesh: Mesh) -> Around:
    return Around(
        gather=hopped(Step(kind="all-gather", axes=axes), mesh),
        scatter=hopped(Step(kind="reduce-scatter", axes=axes), mesh),
    )
