"""One training step, built from the plan: loss, gradients, clipping, AdamW, and the routing bias.

Batch arrays are int32 [rows, length] (``valid``: bool), cut as the plan cuts ``input.tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.plan import Plan
from shardwright.engine_jax.forward import forward
from shardwright.engine_jax.layer_io import cuts_of
from shardwright.engine_jax.loss import summed_cross_entropy
from shardwright.engine_jax.optimizer import OptimizerOptions, apply_gradients
from shardwright.engine_jax.placement import activation_placer, weight_user
from shardwright.engine_jax.routing import moved_bias
from shardwright.engine_jax.shardings import named_sharding, weight_shardings
from shardwright.engine_jax.state import Leaf, State, abstract_state

BATCH_FIELDS = ("tokens", "targets", "positions", "segments", "valid")

BIAS_RATE = 1e-3
"""How far a routing bias moves in a step (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""

Arrays = Mapping[str, jax.Array]


class Metrics(NamedTuple, Generic[Leaf]):
    """Of one step: mean loss over valid tokens, global norm of the gradients before clipping, valid tokens."""

    loss: Leaf
    grad_norm: Leaf
    tokens: Leaf


class Gradients(NamedTuple):
    """The mean loss, its gradient by weight, the valid tokens, and the tokens that chose each expert, by stack."""

    loss: jax.Array
    by_weight: Arrays
    tokens: jax.Array
    counts_NE: Arrays


def batch_sharding(plan: Plan, mesh: Mesh) -> NamedSharding:
    """Where the rows and tokens of a global batch go."""
    return named_sharding(plan.by_name["input.tokens"].in_use, mesh)


def gradient_function(plan: Plan, mesh: Mesh) -> Callable[[Arrays, Arrays, Arrays], Gradients]:
    """``f(weights, buffers, batch)``: the gradient of the mean loss over the valid tokens of the global step.

    With micro-steps, rows are taken in turn and the sums are divided once, by the count of the whole step, so their
    number changes no result.
    """
    request = plan.request
    place, use, cuts = activation_placer(plan, mesh), weight_user(plan, mesh), cuts_of(plan)

    def summed_loss(weights: Arrays, buffers: Arrays, batch: Arrays) -> tuple[jax.Array, Arrays]:
        seen = {name: batch[name] for name in ("tokens", "positions", "segments")}
        seen["tokens"] = place("input.tokens", seen["tokens"])
        result = forward(
            {**weights, **buffers},
            seen,
            request.table,
            place=place,
            use=use,
            remat=request.remat,
            cuts=cuts,
        )
        return summed_cross_entropy(result.logits_BLV, batch["targets"], batch["valid"]), result.counts_NE

    slope = jax.value_and_grad(summed_loss, has_aux=True)
    at_rest = weight_shardings(plan, mesh)

    def gradients(weights: Arrays, buffers: Arrays, batch: Arrays) -> Gradients:
        tokens = jnp.sum(batch["valid"], dtype=jnp.int32)
        if request.micro_steps == 1:
            (loss, counts), by_weight = slope(weights, buffers, batch)
        else:
            parts = _micro_batches(batch, request.micro_steps, batch_sharding(plan, mesh))
            one = jax.eval_shape(slope, weights, buffers, jax.tree.map(lambda array: array[0], parts))
            (loss, counts), by_weight = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one)
            by_weight = {name: jax.lax.with_sharding_constraint(g, at_rest[name]) for name, g in by_weight.items()}

            def add(total: Any, part: Arrays) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, slope(weights, buffers, part)), None

            ((loss, counts), by_weight), _ = jax.lax.scan(add, ((loss, counts), by_weight), parts)
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        return Gradients(loss / count, jax.tree.map(lambda g: g / count, by_weight), tokens, counts)

    return gradients


def train_step(plan: Plan, mesh: Mesh, options: OptimizerOptions) -> jax.stages.Wrapped:
    """``step(state, batch) -> (state, metrics)``, under ``jit``; the state given is donated, and its places are the plan's."""
    gradients_of = gradient_function(plan, mesh)
    decayed = frozenset(weight.name for weight in plan.request.table.weights if len(weight.shape) > 1)

    def step(state: State[jax.Array], batch: Arrays) -> tuple[State[jax.Array], Metrics[jax.Array]]:
        gradients = gradients_of(state.weights, state.buffers, batch)
        after, norm = apply_gradients(state, gradients.by_weight, options, decayed)
        buffers = {name: _moved(name, buffer, gradients.counts_NE) for name, buffer in state.buffers.items()}
        return after._replace(buffers=buffers), Metrics(gradients.loss, norm, gradients.tokens)

    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan, mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(places, dict.fromkeys(BATCH_FIELDS, batch_sharding(plan, mesh))),
        out_shardings=(places, Metrics(whole, whole, whole)),
        donate_argnums=0,
    )


def abstract_batch(plan: Plan, mesh: Mesh) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch, to lower a step from."""
    shape, sharding = (plan.request.batch, plan.request.length), batch_sharding(plan, mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "valid" else jnp.int32, sharding=sharding)
        for name in BATCH_FIELDS
    }


def _micro_batches(batch: Arrays, num: int, sharding: NamedSharding) -> Arrays:
    """The rows in ``num`` parts along a new leading dim: part i has every num-th row, so each device keeps its own."""
    spec = PartitionSpec(None, *sharding.spec)

    def split(array_BL: jax.Array) -> jax.Array:
        parts = array_BL.reshape(array_BL.shape[0] // num, num, array_BL.shape[1]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(parts, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(split, batch)


def _moved(name: str, bias_NE: jax.Array, counts_NE: Arrays) -> jax.Array:
    """A routing bias after the step; its stack is the first word of its name."""
    return moved_bias(bias_NE, counts_NE[name.split(".", 1)[0]], BIAS_RATE)
