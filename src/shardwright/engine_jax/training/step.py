"""One training step, built from the plan: loss, gradients, clipping, AdamW, and the routing bias.

Batch arrays are int32 [rows, length] (``valid``: bool), cut as the plan cuts ``input.tokens``.

The gradients are made by each device over its own parts (``shard_map`` over the whole mesh), every collective being the
plan's; clipping and the optimizer work element by element, under ``jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.attention.kernels import backend_of
from shardwright.engine_jax.experts.moe import MoeCounts
from shardwright.engine_jax.experts.routing import moved_bias
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import Links
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.layers.loss import summed_cross_entropy
from shardwright.engine_jax.lowering.links import late_sums, links_of
from shardwright.engine_jax.lowering.shardings import named_sharding, weight_shardings
from shardwright.engine_jax.model.forward import forward
from shardwright.engine_jax.training.optimizer import apply_gradients
from shardwright.engine_jax.training.state import Leaf, State, abstract_state
from shardwright.models.parts.ends import BATCH_FIELDS
from shardwright.training.optimizer import BIAS_RATE, OptimizerOptions, decayed_names, frozen_names

Arrays = Mapping[str, jax.Array]


class Metrics(NamedTuple, Generic[Leaf]):
    """Of one step: mean loss over valid tokens, global norm of the gradients before clipping, valid tokens.

    ``dropped``: choices of an expert that its capacity had no place for. ``overflow``: choices that a buffer of the
    layout's had no room for, in all layers; where it is not 0, the step is not that of the model.
    """

    loss: Leaf
    grad_norm: Leaf
    tokens: Leaf
    dropped: Leaf
    overflow: Leaf


class Gradients(NamedTuple, Generic[Leaf]):
    """The mean loss, its gradient by weight, the valid tokens, and what experts saw, by stack and layer."""

    loss: Leaf
    by_weight: Mapping[str, Leaf]
    tokens: Leaf
    counts: Any


def batch_sharding(plan: Plan, mesh: Mesh) -> NamedSharding:
    """Where the rows and tokens of a global batch go."""
    return named_sharding(plan.by_name["input.tokens"].in_use, mesh)


def gradient_function(plan: Plan, mesh: Mesh) -> Callable[[Arrays, Arrays, Arrays], Gradients[jax.Array]]:
    """``f(weights, buffers, batch)``: the gradient of the mean loss over the valid tokens of the global step.

    With microbatches, rows are taken in turn and the sums are divided once, by the count of the whole step, so their
    number changes no result. What replicas hold in parts is summed once, after the last of them.
    """
    shardings = weight_shardings(plan, mesh)
    frozen = frozen_names(plan)
    weights = {name: sharding.spec for name, sharding in shardings.items() if name not in frozen}
    buffers = {name: shardings[name].spec for name in frozen}
    whole = PartitionSpec()
    return jax.shard_map(
        _own_gradients(plan, links_of(plan, backend_of(mesh))),
        mesh=mesh,
        in_specs=(weights, buffers, dict.fromkeys(BATCH_FIELDS, batch_sharding(plan, mesh).spec)),
        out_specs=Gradients(loss=whole, by_weight=weights, tokens=whole, counts=whole),
        # The plan says what is summed where; there is nothing left for JAX to find out.
        check_vma=False,
    )


def _own_gradients(plan: Plan, links: Links) -> Callable[[Arrays, Arrays, Arrays], Gradients[jax.Array]]:
    """The gradients of one device: of its parts of the weights, summed as the plan says."""
    request = plan.request

    def summed_loss(weights: Arrays, buffers: Arrays, batch: Arrays) -> tuple[jax.Array, Mapping[str, MoeCounts]]:
        result = forward({**weights, **buffers}, batch, request.table, links, remat=request.remat)
        targets = links.move("input.targets", "logits.targets", batch["targets"])
        valid = links.move("input.valid", "logits.valid", batch["valid"])
        with of_component("logits"):
            loss = summed_cross_entropy(result.logits_BLV, targets, valid, links.vocab.get("logits", ()))
        return loss, result.counts

    # Traced once, though microbatches ask twice; inlined, it is not seen in the program.
    cotangent = jax.jit(jax.value_and_grad(summed_loss, has_aux=True), inline=True)

    def gradients(weights: Arrays, buffers: Arrays, batch: Arrays) -> Gradients[jax.Array]:
        tokens = _summed(jnp.sum(batch["valid"], dtype=jnp.int32), _cutting(plan, "input.valid"))
        if request.microbatches == 1:
            (loss, counts), by_weight = cotangent(weights, buffers, batch)
        else:
            parts = {name: _in_turn(array, request.microbatches) for name, array in batch.items()}
            one = jax.eval_shape(cotangent, weights, buffers, jax.tree.map(lambda array: array[0], parts))
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one)

            def add(total: Any, part: Arrays) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, cotangent(weights, buffers, part)), None

            ((loss, counts), by_weight), _ = jax.lax.scan(add, nothing, parts)
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        return Gradients(
            loss=_summed(loss, _cutting(plan, "logits.targets")) / count,
            by_weight={name: mean_of(_whole(plan, name, g), count) for name, g in by_weight.items()},
            tokens=tokens,
            counts=_summed(counts, _cutting(plan, "router.grouped")) if counts else counts,
        )

    return gradients


def train_step(plan: Plan, mesh: Mesh, options: OptimizerOptions) -> jax.stages.Wrapped:
    """``step(state, batch) -> (state, metrics)``, under ``jit``; the state given is donated, and its places are the plan's."""
    gradients_of = gradient_function(plan, mesh)
    decayed = decayed_names(plan)

    def step(state: State[jax.Array], batch: Arrays) -> tuple[State[jax.Array], Metrics[jax.Array]]:
        gradients = gradients_of(state.weights, state.buffers, batch)
        after, norm = apply_gradients(state, gradients.by_weight, options, decayed)
        buffers = {name: _moved(plan, name, buffer, gradients.counts) for name, buffer in state.buffers.items()}
        lost = {
            name: sum((jnp.sum(getattr(counts, name)) for counts in gradients.counts.values()), jnp.int32(0))
            for name in ("dropped", "overflow")
        }
        return after._replace(buffers=buffers), Metrics(gradients.loss, norm, gradients.tokens, **lost)

    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan, mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(places, dict.fromkeys(BATCH_FIELDS, batch_sharding(plan, mesh))),
        out_shardings=(places, Metrics(whole, whole, whole, whole, whole)),
        donate_argnums=0,
    )


def abstract_batch(plan: Plan, mesh: Mesh) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch, to lower a step from."""
    shape, sharding = (plan.request.batch, plan.request.length), batch_sharding(plan, mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "valid" else jnp.int32, sharding=sharding)
        for name in BATCH_FIELDS
    }


def _in_turn(array_BL: jax.Array, num: int) -> jax.Array:
    """A device's rows in ``num`` parts along a new leading dim: part i has every num-th row."""
    return array_BL.reshape(array_BL.shape[0] // num, num, array_BL.shape[1]).swapaxes(0, 1)


def _cutting(plan: Plan, tensor: str) -> tuple[str, ...]:
    """The axes that give each device tokens of its own of an activation."""
    return plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes)


def _whole(plan: Plan, name: str, gradient: jax.Array) -> jax.Array:
    """The gradient of a weight, of which replicas have parts until now."""
    with of_component(plan.by_name[name].component), of_tensor(name):
        return _summed(gradient, late_sums(plan, name))


def mean_of(gradient: jax.Array, count: jax.Array) -> jax.Array:
    """A gradient summed over tokens, over their ``count`` (float32), in its own dtype."""
    wide = gradient.astype(computed("mean", gradient.dtype))
    return (wide / count).astype(gradient.dtype)


def _summed(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.psum(tree, axes) if axes else tree


def _moved(plan: Plan, name: str, bias_NE: jax.Array, counts: Mapping[str, MoeCounts]) -> jax.Array:
    """A routing bias after the step, by the counts of its stack."""
    stack = plan.by_name[name].stack
    assert stack is not None, name
    return moved_bias(bias_NE, counts[stack].by_expert, BIAS_RATE)
