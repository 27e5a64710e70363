"""The plan, lowered: the collectives between two named activations, and between a weight at rest and in use.

The core gives the steps of each resharding in both passes. The forward pass reshards the activation. The backward pass reshards
the cotangent, and sums it over the axes over which it is partial. JAX differentiates none of the collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import in_use_dtype
from shardwright.core.model.table import Move, Weight
from shardwright.core.plan.attention_kernels import Backend, choose_attention, local_attention
from shardwright.core.plan.expert_kernels import choose_expert_kernel
from shardwright.core.plan.movement import ReshardStep, hopped, reshard_steps
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import WeightResharding, resharding, weight_reshardings, weight_update
from shardwright.core.policies.policy import INPUT, WEIGHTS
from shardwright.core.quantization.delayed import names_by_place
from shardwright.core.quantization.dispatch import sent_rows
from shardwright.core.quantization.elements import elements_of
from shardwright.core.recipes.kernels import CPU, Device
from shardwright.core.resolution.resolve import expert_axes, traffic_of
from shardwright.core.resolution.row_order import tiles
from shardwright.core.resolution.token_hops import token_hops
from shardwright.engine_jax.io.layer_io import (
    GATHERED,
    AtRest,
    AttentionLinks,
    ExpertLinks,
    Links,
    LowPrecision,
    Resting,
    Ring,
    TokenRing,
    WithGradient,
    index_of,
    size_of,
)
from shardwright.engine_jax.io.redistribute import redistribute
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.lowering.coded import CodedGather
from shardwright.engine_jax.precision.coded import Coded, carrier_of


def links_of(plan: Plan, backend: Backend = "cpu", device: Device = CPU, *, microbatches: int | None = None) -> Links:
    """What the mathematics needs of a plan, on each device of its mesh, which may be of the layers or the ends of a model alone; ``backend``:
    the kind of these devices, ``device``: which products they have. ``microbatches``: of a step, of which the plan of a stage has one; None:
    those of the plan."""
    # The experts move dispatched tokens themselves.
    moves = {
        (move.source, move.target): _Resharding.of(plan, move)
        for move in plan.request.table.moves
        if move.kind not in ("dispatch", "combine")
    }
    low = _low(plan, device, microbatches or plan.request.microbatches)
    uses = _uses(plan, low)
    tokens, logits = plan.by_name.get("embedding.tokens"), plan.by_name.get("logits.scores")
    embedding = {} if tokens is None else weight_reshardings(plan.request, plan.mesh, tokens)

    def move(source: str, target: str, array: jax.Array) -> jax.Array:
        resharding = moves[source, target]
        with of_component(resharding.component), of_tensor(target):
            moved = resharding.reshard(array)
        # What is added to the residual stream is no input of a layer yet. An array that stays where it is keeps the name that it has.
        same = resharding.move.kind in ("queries", "keys") and not resharding.forward
        return moved if target == INPUT or same else checkpoint_name(moved, target)

    def use(
        name: str,
        weight: AtRest,
        component: str | None = None,
        *,
        high: bool = False,
        factor: jax.Array | None = None,
    ) -> Any:
        found = uses[name, component]
        with of_component(component or plan.by_name[name].component), of_tensor(name):
            (in_use,) = (found._replace(coded=None) if high else found).into_use(weight, factor=factor)
        return checkpoint_name(in_use, GATHERED if found.kept else WEIGHTS)

    def use_twice(name: str, weight: AtRest) -> tuple[jax.Array, jax.Array]:
        with of_component(plan.by_name[name].component), of_tensor(name):
            first, second = map(carrier_of, uses[name, None].into_use(weight, times=2))
        return first, second

    def scatter(name: str, gradient: jax.Array, like: jnp.dtype) -> jax.Array:
        with of_component(plan.by_name[name].component), of_tensor(name):
            return uses[name, None].reduced((gradient,), like)

    return Links(
        move=move,
        scatter=scatter,
        kept={
            name: jnp.dtype(one.reduce_dtype) for (name, component), one in uses.items() if one.kept and not component
        },
        use=use,
        use_twice=use_twice,
        vocab={
            component: plan.mesh.larger_than_one(spec.axes_of("vocab"))
            for component, spec in (
                *((end, one.operand) for end, one in embedding.items() if end == "embedding"),
                *([] if logits is None else [("logits", logits.in_use)]),
            )
        },
        entries=None if logits is None else (logits.unpadded or (None,))[-1],
        loss_chunks=plan.request.loss_chunks,
        tied_once=len(set(embedding.values())) == 1,
        attention=_attention(plan, backend),
        experts=_experts(plan, backend),
        low=low,
    )


class _Resharding(NamedTuple):
    """A move of the table on a mesh. ``shape``: of the source's local shard."""

    move: Move
    component: str
    names: tuple[str, ...]
    forward: tuple[ReshardStep, ...]
    backward: tuple[ReshardStep, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, move: Move) -> _Resharding:
        mesh, planned = plan.mesh, resharding(plan.request, plan.by_name, move)
        return cls(
            move=move,
            component=planned.component,
            names=planned.before.logical_axes,
            forward=planned.forward(mesh),
            backward=planned.backward(mesh),
            shape=_shard_shape(planned.before, planned.shape.values(), mesh),
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
    """A weight in one of its uses.

    ``gathered``: the steps from rest to the gathered weight. ``sliced``: slices from that to the shard that this use multiplies.
    ``scattered``: the steps of its gradient to the spec in which gradients are summed over microbatches. ``replicated_gradient``: axes along which all devices make the same gradient, so that only
    that of the first device counts. ``kept``: the backward pass reads what the forward pass has gathered.
    """

    names: tuple[str, ...]
    gathered: tuple[ReshardStep, ...]
    scattered: tuple[ReshardStep, ...]
    sliced: tuple[ReshardStep, ...]
    replicated_gradient: tuple[str, ...]
    dtype: str
    gather_dtype: str
    reduce_dtype: str
    shape: tuple[int, ...]
    kept: bool
    coded: CodedGather | None = None

    def into_use(
        self, weight: AtRest, times: int = 1, factor: jax.Array | None = None
    ) -> tuple[jax.Array | Coded, ...]:
        """The weight in use, ``times`` times; the gradients of all are summed. ``factor``: of a delayed amax; its cotangent is the
        amax of what is quantized here (``precision/delayed.py``)."""
        values = weight.values if isinstance(weight, WithGradient) else weight
        like = weight.gradient if isinstance(weight, WithGradient) else weight
        assert isinstance(values, Resting) or values.shape == self.shape, (self.names, values.shape, self.shape)

        def gathered(weight: jax.Array | Resting, factor: jax.Array | None) -> tuple[jax.Array | Coded, ...]:
            if isinstance(weight, Resting):
                assert self.coded is not None, self.names
                return (self.coded.gathered(jax.tree.map(_in_order, weight)),) * times
            if self.coded is not None:
                return (self.coded.gathered(_in_order(weight), factor),) * times
            narrow = _in_order(weight).astype(jnp.dtype(self.gather_dtype))
            return (
                redistribute(narrow, (*self.gathered, *self.sliced), self.names).astype(jnp.dtype(self.dtype)),
            ) * times

        def amax(weight: jax.Array | Resting, factor: jax.Array | None) -> jax.Array | None:
            """What the backward pass returns for a factor: zeros where the product returns the amax."""
            if factor is None:
                return None
            if self.coded is None or isinstance(weight, Resting):
                return jnp.zeros_like(factor)
            return self.coded.amax(weight, factor)

        @jax.custom_vjp
        def into_use(weight: jax.Array, factor: jax.Array | None) -> tuple[jax.Array | Coded, ...]:
            return gathered(weight, factor)

        @jax.custom_vjp
        def into_use_apart(
            weight: jax.Array | Resting, gradient: jax.Array, factor: jax.Array | None
        ) -> tuple[jax.Array | Coded, ...]:
            del gradient
            return gathered(weight, factor)

        into_use.defvjp(
            lambda weight, factor: (gathered(weight, factor), amax(weight, factor)),
            lambda amax, found: (self.reduced(found, like.dtype), amax),
        )
        if not isinstance(weight, WithGradient):
            return into_use(weight, factor)
        into_use_apart.defvjp(
            lambda weight, _, factor: (gathered(weight, factor), amax(weight, factor)),
            lambda amax, found: (None, self.reduced(found, like.dtype), amax),
        )
        return into_use_apart(weight.values, weight.gradient, factor)

    def reduced(self, cotangents: tuple[jax.Array | Coded, ...], like: jnp.dtype) -> jax.Array:
        """The gradient of the weight at rest, from those of each of its uses."""
        gradients = [carrier_of(one) for one in cotangents]
        # Cast before the sum: with more devices, more is summed by collectives, and no layout may change numbers.
        first, *others = (gradient.astype(jnp.dtype(self.reduce_dtype)) for gradient in gradients)
        gradient = sum(others, first)
        for step in reversed(self.sliced):
            gradient = _zero_padded(gradient, step.axes, self.names.index(step.target or ""))
        if self.replicated_gradient:
            gradient = jnp.where(index_of(self.replicated_gradient) == 0, gradient, jnp.zeros_like(gradient))
        gradient = redistribute(gradient, self.scattered, self.names)
        return _in_order(gradient.astype(like))


def _in_order(array: jax.Array) -> jax.Array:
    """The array with row-major memory layout: the last dim fastest.

    A compiler puts the dim that a collective gathers or scatters first in memory, and keeps that order through the loop over
    layers: the weights of all layers, and their gradients, are then stored twice, in two orders. With this order fixed on both
    sides, it transposes one layer at a time.
    """
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _zero_padded(shard: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The full dim with this device's shard at its offset, and zeros elsewhere."""
    shape = list(shard.shape)
    shape[dim] *= size_of(axes)
    return jax.lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, shard.dtype), shard, index_of(axes) * shard.shape[dim], dim
    )


def coded_gathers(plan: Plan) -> Mapping[str, CodedGather]:
    """The gathers of each weight of which codes are sent."""
    uses = _uses(plan, _low(plan, CPU, plan.request.microbatches))
    return {name: one.coded for (name, component), one in uses.items() if component is None and one.coded is not None}


def _uses(plan: Plan, low: Mapping[str, LowPrecision]) -> dict[tuple[str, str | None], _Use]:
    rows = plan.by_name
    of_codes = {weight.name: weight for weight in plan.quantized if weight.copies}
    found = {}
    for weight in plan.request.table.weights:
        for component, planned in weight_reshardings(plan.request, plan.mesh, rows[weight.name]).items():
            second = None if component == weight.component else component
            use = _use(plan, weight, rows[weight.name], planned)
            if weight.name in of_codes:
                use = use._replace(
                    coded=CodedGather.of(
                        of_codes[weight.name],
                        low[weight.name],
                        use.names,
                        (*use.gathered, *use.sliced),
                        (use.gather_dtype, use.dtype),
                        _shard_shape(planned.operand, rows[weight.name].shape, plan.mesh),
                        plan.mesh,
                    )
                )
            found[weight.name, second] = use
    return found


def _use(plan: Plan, weight: Weight, row: TensorPlan, planned: WeightResharding) -> _Use:
    mesh = plan.mesh
    return _Use(
        names=planned.at_rest.logical_axes,
        gathered=reshard_steps(planned.at_rest, planned.gathered, (), mesh),
        sliced=reshard_steps(planned.gathered, planned.operand, (), mesh),
        scattered=(
            *reshard_steps(planned.gathered, planned.at_rest, planned.scattered, mesh),
            *weight_update(plan.request, mesh, row).in_microbatches(mesh),
        ),
        replicated_gradient=planned.replicated_gradient,
        dtype=in_use_dtype(weight, plan.request.dtype),
        gather_dtype=planned.gather_dtype,
        reduce_dtype=planned.reduce_dtype,
        shape=_shard_shape(planned.at_rest, row.shape, mesh),
        kept=planned.kept,
    )


def _low(plan: Plan, device: Device, microbatches: int) -> dict[str, LowPrecision]:
    scales = plan.delayed
    return {
        weight.name: LowPrecision(
            quantizers={(one.product, one.operand): one.quantizer for one in weight.operands},
            name=weight.name,
            num_layers=weight.num,
            amax_axes={(one.product, one.operand): one.reduced for one in weight.operands},
            same_amax={(one.product, one.operand): one.same_amax for one in weight.operands},
            delayed=names_by_place(weight, scales),
            elements=elements_of(weight, plan.mesh, plan.row_chunks, microbatches),
            kernels={
                product: one.name for product, one in weight.kernels_on(device, "jax", plan.request.dtype).items()
            },
        )
        for weight in plan.quantized
    }


def _shard_shape(spec: Spec, shape: Iterable[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a local shard."""
    return tuple(size // mesh.size(dim.axes) for size, dim in zip(shape, spec.dims, strict=True))


def _sharding_axes(plan: Plan, tensor: str, logical_axis: str) -> tuple[str, ...]:
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes_of(logical_axis))


def _attention(plan: Plan, backend: Backend) -> AttentionLinks:
    keys = "attention.keys_attended"
    if keys not in plan.by_name:
        # Ends that all stages share.
        return AttentionLinks()
    heads = "kv_heads" if "kv_heads" in plan.by_name[keys].in_use.logical_axes else "heads"
    length = _sharding_axes(plan, "attention.queries", "length")
    has_ring = plan.request.layout.move_attention == "ring" and length
    attending = local_attention(plan)
    assert attending is not None, plan.request.table.name
    return AttentionLinks(
        ring=Ring.over(plan.mesh, length) if has_ring else None,
        heads=_sharding_axes(plan, "attention.queries_attended", "heads"),
        kv_heads=_sharding_axes(plan, keys, heads),
        kernel=choose_attention(backend, attending),
        chunks=plan.row_chunks,
    )


def _experts(plan: Plan, backend: Backend) -> ExpertLinks | None:
    if "moe.dispatched" not in plan.by_name:
        return None
    traffic = traffic_of(plan.request, plan.mesh)
    buffer_rows = traffic.buffer_rows(plan.request.expert_buffer)
    row, axes = _sharding_axes(plan, "router.grouped", "groups"), expert_axes(plan.request.layout, plan.mesh)
    return ExpertLinks(
        axes=axes,
        ring=_token_ring(axes, plan.mesh) if axes and plan.request.layout.move_moe == "ring" else None,
        row=row,
        tiles=tiles(plan.row_chunks, plan.mesh.size(row)),
        traffic=traffic,
        hops=token_hops(plan.request, plan.mesh),
        buffer_rows=buffer_rows,
        products=choose_expert_kernel(
            backend, buffer_rows=buffer_rows, experts=traffic.experts, dtype=plan.by_name["moe.dispatched"].dtype
        ),
        sent=sent_rows(plan.request.precision, plan.request.table.names),
    )


def _token_ring(axes: tuple[str, ...], mesh: Mesh) -> TokenRing:
    return TokenRing(
        gather=hopped(ReshardStep(kind="all-gather", axes=axes), mesh),
        scatter=hopped(ReshardStep(kind="reduce-scatter", axes=axes), mesh),
    )
