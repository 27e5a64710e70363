"""Clipping by the global norm, an optimizer by name, warm-up and cosine decay of its rate, and the average of the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax

from shardwright.core.model.optimizer import ADAMW, AVERAGE, FIRST, MASTER, SECOND, Optimizer
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.training.named_optimizer import changed
from shardwright.engine_jax.training.state import State
from shardwright.training.arithmetic import Arithmetic
from shardwright.training.optimizer import OptimizerOptions, average_share, learning_rate
from shardwright.training.optimizers import OPTIMIZERS, is_own

Arrays = Mapping[str, jax.Array]
Kept = Mapping[str, Arrays]
"""What is kept for the weights, by prefix and weight."""

OF_ARRAYS = Arithmetic(
    cos=jnp.cos,
    least=jnp.minimum,
    most=jnp.maximum,
    root=jnp.sqrt,
    sign=jnp.sign,
    exp_less_one=jnp.expm1,
)


def apply_gradients(
    state: State[jax.Array],
    gradients: Arrays,
    options: OptimizerOptions,
    decayed: Collection[str],
    *,
    optimizer: Optimizer = ADAMW,
    average: float | None = None,
    stacked: Collection[str] = (),
) -> tuple[State[jax.Array], jax.Array]:
    """The state after one step, with its buffers unchanged, and the global norm of the gradients before clipping.

    What is kept for a weight, and the weight, keep their own dtypes. Where a weight is kept in a wider dtype too, that is updated. Weights named in ``decayed`` also decay by the learning
    rate times the weight decay. ``average``: how much of the average of the weights a step leaves. ``stacked``: the weights whose dim 0 is layers.
    """
    gradients = {name: g.astype(computed("clipping", g.dtype)) for name, g in gradients.items()}
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, options.clip / jnp.maximum(norm, 1e-30))
    gradients = {name: g * factor for name, g in gradients.items()}
    wide = {
        prefix: {name: array.astype(computed("moments", array.dtype)) for name, array in arrays.items()}
        for prefix, arrays in state.kept.items()
    }
    count = cast(jax.Array, optax.safe_increment(state.step))
    rate = learning_rate(options, state.step, OF_ARRAYS)
    master = state.kept.get(MASTER.prefix, state.weights)
    decays = {name: options.weight_decay if name in decayed else 0.0 for name in state.weights}
    wide_weights = {name: w.astype(computed("update", w.dtype)) for name, w in master.items()}
    shared = state.shared
    if is_own(optimizer):
        changes, after, shared = changed(optimizer, gradients, state.kept, shared, wide_weights, rate, stacked)
        wide_weights = {name: w + (changes[name] - rate * decays[name] * w) for name, w in wide_weights.items()}
    else:
        updates, after = _updates(optimizer, gradients, wide, state.step, count)
        wide_weights = {name: w - rate * (updates[name] + decays[name] * w) for name, w in wide_weights.items()}
    weights = {name: wide_weights[name].astype(w.dtype) for name, w in state.weights.items()}
    if average is not None:
        share = average_share(average, count.astype(jnp.float32), OF_ARRAYS)
        before = wide[AVERAGE.prefix]
        averages = {name: mean + share * (weights[name].astype(mean.dtype) - mean) for name, mean in before.items()}
        after = {**after, AVERAGE.prefix: averages}
    after = {**after, MASTER.prefix: wide_weights}
    kept = {
        prefix: {name: after[prefix][name].astype(array.dtype) for name, array in arrays.items()}
        for prefix, arrays in state.kept.items()
    }
    return state._replace(weights=weights, kept=kept, shared=shared, step=count), norm


def _updates(
    optimizer: Optimizer, gradients: Arrays, kept: Kept, step: jax.Array, count: jax.Array
) -> tuple[Arrays, Kept]:
    """The update of each weight before its rate and decay, and what the optimizer keeps after it."""
    constants = cast(Mapping[str, float], optimizer.constants)
    if optimizer.name == ADAMW.name:
        # In the order of optax's own operations, so that the bits of a run do not change with a release.
        adam = optax.scale_by_adam(b1=constants["b1"], b2=constants["b2"], eps=constants["eps"])
        before = optax.ScaleByAdamState(count=step, mu=kept[FIRST], nu=kept[SECOND])
        updates, found = cast(tuple[Arrays, optax.ScaleByAdamState], adam.update(gradients, before))
        return updates, {FIRST: cast(Arrays, found.mu), SECOND: cast(Arrays, found.nu)}
    formula = OPTIMIZERS[optimizer.name].formula
    updates, after = {}, {one.prefix: {} for one in optimizer.kept}
    for name, g in gradients.items():
        before = {prefix: kept[prefix][name] for prefix in after}
        updates[name], found = formula(g, before, count, constants, OF_ARRAYS)
        for prefix in after:
            after[prefix][name] = found[prefix]
    return updates, after
