"""One training step, built from the plan: loss, gradients, clipping, the optimizer, and the routing bias.

Batch arrays are int32 [rows, length] (``valid``: bool), sharded as the plan shards ``input.tokens``.

B rows, L tokens, V vocabulary; Z layers of a stack with experts, E experts.

Each device computes gradients of its local shards (``shard_map`` over the entire mesh), and every collective is in the
plan. Clipping and the optimizer work element by element, under ``jit``, on the part of each weight that a device updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.model.optimizer import MASTER
from shardwright.core.pipeline.program import stage_program
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.random_bits import words_of
from shardwright.core.resolution.token_hops import may_overflow
from shardwright.engine_jax.attention.kernels import backend_of
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.experts.route import updated_bias
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import Links, Site, WithGradient
from shardwright.engine_jax.io.mesh import product_device
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.resting import resting, resting_specs
from shardwright.engine_jax.lowering.shardings import named_sharding, partition_spec, weight_shardings
from shardwright.engine_jax.lowering.updates import gathered_parts, gradients_apart, own_parts, reduced
from shardwright.engine_jax.model.ends import at_the_end, loss_of
from shardwright.engine_jax.model.forward import through_layers
from shardwright.engine_jax.precision.delayed import factors_of, reduced_amaxes, updated
from shardwright.engine_jax.stages.loop import sums_of_stages
from shardwright.engine_jax.training.optimizer import apply_gradients
from shardwright.engine_jax.training.state import Leaf, State, abstract_state, rounded
from shardwright.models.layers.decoder import walk_of
from shardwright.models.layers.ends import BATCH_FIELDS
from shardwright.training.optimizer import BIAS_RATE, OptimizerOptions, decayed_names, frozen_names, stacked_names

Arrays = Mapping[str, jax.Array]


class Metrics(NamedTuple, Generic[Leaf]):
    """The numbers of one step: mean loss over valid tokens, global norm of the gradients before clipping, valid tokens.

    ``dropped``: token-expert assignments above an expert's capacity. ``overflow``: assignments above the capacity of
    a buffer of the layout, in all layers; where it is not 0, the layout has changed the step's numbers.
    """

    loss: Leaf
    grad_norm: Leaf
    tokens: Leaf
    dropped: Leaf
    overflow: Leaf


class Gradients(NamedTuple, Generic[Leaf]):
    """The mean loss, its gradient by weight, the valid tokens, and the counts of the experts by stack and layer.

    ``amaxes``: by the names of the plan's delayed scales, those of the step, int32 bits."""

    loss: Leaf
    by_weight: Mapping[str, Leaf]
    tokens: Leaf
    counts: Any
    amaxes: Mapping[str, Leaf]


class Moment(NamedTuple, Generic[Leaf]):
    """What products of low precision have of the run: the steps done, and the factors of delayed scales."""

    step: Leaf
    factors: Mapping[str, Leaf]


def batch_sharding(plan: Plan, mesh: Mesh) -> NamedSharding:
    """The sharding of the rows and tokens of a global batch."""
    return named_sharding(plan.by_name["input.tokens"].in_use, mesh)


def gradient_function(plan: Plan, mesh: Mesh, seed: int = 0) -> Callable[..., Gradients[jax.Array]]:
    """``f(weights, buffers, batch, moment)``: the gradient of the mean loss over the valid tokens of the global step.

    ``moment``: left out where no product is quantized. ``seed``: of the run, for random numbers.

    Each is sharded as the update of its weight. Gradients are summed over microbatches and divided once, by the count of the entire step, so the number of microbatches
    changes no result. Gradients that are partial over replicas are summed once, after the last microbatch.
    """
    shardings = weight_shardings(plan, mesh)
    frozen = frozen_names(plan)
    weights = {name: sharding.spec for name, sharding in shardings.items() if name not in frozen}
    buffers = {name: shardings[name].spec for name in frozen}
    gradients = {name: partition_spec(plan.by_name[name].stacked_updated) for name in weights}
    at_rest = {**weights, **resting_specs(plan)}
    replicated = PartitionSpec()
    layers = replicated if plan.pipeline is None else PartitionSpec(plan.pipeline.axes)
    amaxes = {one.name: partition_spec(one.spec) for one in plan.delayed}
    moment = () if plan.request.precision is None else (Moment(replicated, amaxes),)
    return jax.shard_map(
        _local_gradients(plan, links_of_step(plan, mesh), seed),
        mesh=mesh,
        in_specs=(at_rest, buffers, dict.fromkeys(BATCH_FIELDS, batch_sharding(plan, mesh).spec), *moment),
        out_specs=Gradients(loss=replicated, by_weight=gradients, tokens=replicated, counts=layers, amaxes=amaxes),
        # The plan says what is summed over which axes, so JAX need not infer it.
        check_vma=False,
    )


class StepLinks(NamedTuple):
    """The links of a step. ``shared``: in stages, of the ends that all of them share."""

    links: Links
    shared: Links | None


def links_of_step(plan: Plan, mesh: Mesh) -> StepLinks:
    """The links of a plan, in stages of its program, on the devices of a mesh."""
    backend, device, microbatches = backend_of(mesh), product_device(mesh), plan.request.microbatches
    return StepLinks(
        links_of(plan.program or plan, backend, device, microbatches=microbatches),
        None if plan.ends_plan is None else links_of(plan.ends_plan, backend, device, microbatches=microbatches),
    )


class Sums(NamedTuple):
    """Of a step, on one device: the loss and the gradients, summed over its own tokens; the counts of the experts by stack and layer;
    and the amaxes by the names of delayed scales."""

    loss: jax.Array
    by_weight: Arrays
    counts: Mapping[str, MoeCounts]
    amaxes: Arrays


def _local_gradients(plan: Plan, links: StepLinks, seed: int) -> Callable[..., Gradients[jax.Array]]:
    """The gradients on one device: of its local shards of the weights, summed as the plan says."""
    sums_of = _of_microbatches(plan, links.links, seed) if plan.pipeline is None else _of_stages(plan, links, seed)
    # Where all stages share the logits, each has the loss of the tokens that its role there gives it.
    shared = plan.ends_plan is not None and "logits.targets" in plan.ends_plan.by_name
    stages = () if plan.pipeline is None or shared else plan.pipeline.axes

    def gradients(
        weights: Arrays, buffers: Arrays, batch: Arrays, moment: Moment[jax.Array] | None = None
    ) -> Gradients[jax.Array]:
        tokens = _summed(jnp.sum(batch["valid"], dtype=jnp.int32), _token_axes(plan, "input.valid"))
        sums = sums_of(weights, buffers, batch, moment)
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        return Gradients(
            loss=_summed(sums.loss, (*stages, *_token_axes(plan, "logits.targets"))) / count,
            by_weight={name: mean_of(reduced(plan, name, g), count) for name, g in sums.by_weight.items()},
            tokens=tokens,
            counts=_summed(sums.counts, _token_axes(plan, "router.grouped")) if sums.counts else sums.counts,
            amaxes=reduced_amaxes(plan.delayed, sums.amaxes),
        )

    return gradients


SumsOf = Callable[[Arrays, Arrays, Arrays, Moment[jax.Array] | None], Sums]
"""``f(weights, buffers, batch, moment)``: of a device's own rows."""


def _of_stages(plan: Plan, links: StepLinks, seed: int) -> SumsOf:
    """In stages. ``links``: of the plan of the program."""
    program = stage_program(plan)
    assert program is not None

    def sums(weights: Arrays, buffers: Arrays, batch: Arrays, moment: Moment[jax.Array] | None) -> Sums:
        microbatches = {name: _microbatches(array, plan.request.microbatches) for name, array in batch.items()}
        site = None if moment is None else Site(seed=_words(seed), step=moment.step, factors=moment.factors)
        found = sums_of_stages(program, plan.mesh, plan.request.table, *links, weights, buffers, microbatches, site)
        return Sums(found.loss, found.by_weight, found.counts, found.amaxes)

    return sums


def _of_microbatches(plan: Plan, links: Links, seed: int) -> SumsOf:
    """Without stages: all layers, microbatch after microbatch."""
    request, runs = plan.request, kept_runs(plan.request, plan.mesh, plan.tensors)

    def summed_loss(
        weights: Arrays, factors: Arrays, buffers: Arrays, batch: Arrays, site: Site | None
    ) -> tuple[jax.Array, Mapping[str, MoeCounts]]:
        site = None if site is None else site._replace(factors=factors)
        apart = {name: WithGradient(buffers[name], one) for name, one in weights.items() if name in buffers}
        params = {**weights, **buffers, **apart}
        last = through_layers(params, batch, request.table, links, runs=runs, site=site)
        walk, ends = walk_of(request.table.architecture), at_the_end(links, site)
        return loss_of(last.x_BLM, params, last.tied, batch, walk, ends), last.counts

    # Traced once, though it is called twice with microbatches. Inlined, so that it does not change the program.
    loss_and_gradient = jax.jit(jax.value_and_grad(summed_loss, argnums=(0, 1), has_aux=True), inline=True)

    def sums(weights: Arrays, buffers: Arrays, batch: Arrays, moment: Moment[jax.Array] | None) -> Sums:
        factors = {} if moment is None else moment.factors
        apart = gradients_apart(plan, weights)
        weights, buffers = {**weights, **apart}, {**buffers, **{name: weights[name] for name in apart}}
        site = (
            None if moment is None else Site(seed=_words(seed), step=moment.step, microbatch=jnp.int32(0), factors={})
        )
        if request.microbatches == 1:
            (loss, counts), (by_weight, amaxes) = loss_and_gradient(weights, factors, buffers, batch, site)
            return Sums(loss, by_weight, counts, amaxes)
        microbatches = {name: _microbatches(array, request.microbatches) for name, array in batch.items()}
        sites = None if site is None else _sites(site, request.microbatches)
        first = jax.tree.map(lambda array: array[0], (microbatches, sites))
        shapes = jax.eval_shape(loss_and_gradient, weights, factors, buffers, *first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total: Any, microbatch: tuple[Arrays, Site | None]) -> tuple[Any, None]:
            sums, (by_weight, amaxes) = total
            more, (by_weight_more, more_amaxes) = loss_and_gradient(weights, factors, buffers, *microbatch)
            added = jax.tree.map(jnp.add, (sums, by_weight), (more, by_weight_more))
            return (added[0], (added[1], jax.tree.map(jnp.maximum, amaxes, more_amaxes))), None

        ((loss, counts), (by_weight, amaxes)), _ = jax.lax.scan(add, zeros, (microbatches, sites))
        return Sums(loss, by_weight, counts, amaxes)

    return sums


def train_step(plan: Plan, mesh: Mesh, options: OptimizerOptions, seed: int = 0) -> jax.stages.Wrapped:
    """``step(state, batch) -> (state, metrics)``, under ``jit``. The given state is donated; its shardings are the plan's. Where a device received
    more rows than its experts' buffers hold (``metrics.overflow``), the state is the given one.

    ``seed``: of the run, for random numbers of products."""
    gradients_of = gradient_function(plan, mesh, seed)
    decayed, codes_of = decayed_names(plan), resting(plan, mesh)
    has_site, overflows = plan.request.precision is not None, may_overflow(plan.request, plan.mesh)

    def step(state: State[jax.Array], batch: Arrays) -> tuple[State[jax.Array], Metrics[jax.Array]]:
        moment = (Moment(state.step, factors_of(state.delayed)),) if has_site else ()
        gradients = gradients_of({**state.weights, **state.resting}, state.buffers, batch, *moment)
        # Of a weight that rests as codes only the dtype is of interest: what is updated is its master weight.
        narrow = rounded(plan, state.kept.get(MASTER.prefix, {}))
        parts = state._replace(weights={**own_parts(plan, mesh, state.weights), **narrow})
        after, norm = apply_gradients(
            parts,
            gradients.by_weight,
            options,
            decayed,
            optimizer=plan.request.optimizer,
            average=plan.request.average,
            stacked=stacked_names(plan),
        )
        whole = gathered_parts(plan, mesh, after.weights)
        at_rest = codes_of({name: whole[name] for name in narrow})
        after = after._replace(weights={name: whole[name] for name in state.weights}, resting=at_rest)
        buffers = {name: _updated_bias(plan, name, buffer, gradients.counts) for name, buffer in state.buffers.items()}
        lost = {
            name: sum((jnp.sum(getattr(counts, name)) for counts in gradients.counts.values()), jnp.int32(0))
            for name in ("dropped", "overflow")
        }
        delayed = updated(plan, state.delayed, gradients.amaxes, after.step)
        after = after._replace(buffers=buffers, delayed=delayed)
        if overflows:
            # The step was not the model's: nothing of it stays.
            after = jax.tree.map(lambda new, old: jnp.where(lost["overflow"] == 0, new, old), after, state)
        return after, Metrics(gradients.loss, norm, gradients.tokens, **lost)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan, mesh))
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(shardings, dict.fromkeys(BATCH_FIELDS, batch_sharding(plan, mesh))),
        out_shardings=(shardings, Metrics(replicated, replicated, replicated, replicated, replicated)),
        donate_argnums=0,
    )


def abstract_batch(plan: Plan, mesh: Mesh) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch, to lower a step with."""
    shape, sharding = (plan.request.batch, plan.request.length), batch_sharding(plan, mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "valid" else jnp.int32, sharding=sharding)
        for name in BATCH_FIELDS
    }


def _microbatches(array_BL: jax.Array, num: int) -> jax.Array:
    """A device's rows as ``num`` microbatches along a new leading dim: microbatch i has every ``num``-th row from row i."""
    return array_BL.reshape(array_BL.shape[0] // num, num, array_BL.shape[1]).swapaxes(0, 1)


def _words(seed: int) -> tuple[jax.Array, jax.Array]:
    low, high = words_of(seed)
    return jnp.uint32(low), jnp.uint32(high)


def _sites(site: Site, num: int) -> Site:
    """The site of each microbatch, along a new leading dim."""
    alike = jax.tree.map(lambda number: jnp.broadcast_to(number, num), site)
    return alike._replace(microbatch=jnp.arange(num, dtype=jnp.int32))


def _token_axes(plan: Plan, tensor: str) -> tuple[str, ...]:
    """The axes that shard the tokens of an activation."""
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes)


def mean_of(gradient: jax.Array, count: jax.Array) -> jax.Array:
    """A gradient summed over tokens, divided by their ``count`` (float32), in its own dtype."""
    wide = gradient.astype(computed("mean", gradient.dtype))
    return (wide / count).astype(gradient.dtype)


def _summed(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.psum(tree, axes) if axes else tree


def _updated_bias(plan: Plan, name: str, bias_ZE: jax.Array, counts: Mapping[str, MoeCounts]) -> jax.Array:
    """A routing bias after the step, updated by the counts of its stack."""
    stack = plan.by_name[name].stack
    assert stack is not None, name
    return updated_bias(bias_ZE, counts[stack].by_expert, BIAS_RATE)
