"""AdamW with warm-up, cosine decay and clipping by the global norm, out of optax's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax

from shardwright.core.training import BETA_1, BETA_2, EPSILON, FINAL_LR_SHARE, OptimizerOptions
from shardwright.engine_jax.dtypes import computed
from shardwright.engine_jax.state import State

Arrays = Mapping[str, jax.Array]


def schedule(options: OptimizerOptions) -> optax.Schedule:
    """Learning rate by step number: linear from 0 over ``warmup`` steps, then a cosine to a tenth at ``steps``."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if options.warmup else options.lr,
        peak_value=options.lr,
        warmup_steps=options.warmup,
        decay_steps=max(options.steps, options.warmup + 1),
        end_value=options.lr * FINAL_LR_SHARE,
    )


def apply_gradients(
    state: State[jax.Array], gradients: Arrays, options: OptimizerOptions, decayed: frozenset[str]
) -> tuple[State[jax.Array], jax.Array]:
    """The state after one step, but for its buffers, and the global norm of the gradients before clipping.

    Moments and weights are kept in their own dtypes. Weights named in ``decayed`` shrink by the learning
    rate times the weight decay.
    """
    gradients = {name: g.astype(computed("clipping", g.dtype)) for name, g in gradients.items()}
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, options.clip / jnp.maximum(norm, 1e-30))
    gradients = {name: g * factor for name, g in gradients.items()}
    adam = optax.scale_by_adam(b1=BETA_1, b2=BETA_2, eps=EPSILON)
    # The first update sees lr(1): a step at learning rate 0 would train nothing.
    wide = [
        {name: m.astype(computed("moments", m.dtype)) for name, m in moments.items()}
        for moments in (state.first, state.second)
    ]
    before = optax.ScaleByAdamState(count=state.step, mu=wide[0], nu=wide[1])
    updates, after = cast(tuple[Arrays, optax.ScaleByAdamState], adam.update(gradients, before))
    mu, nu = cast(Arrays, after.mu), cast(Arrays, after.nu)
    rate = schedule(options)(state.step + 1 if options.warmup else state.step)
    decays = {name: options.weight_decay if name in decayed else 0.0 for name in state.weights}
    weights = {}
    for name, w in state.weights.items():
        wide_w = w.astype(computed("update", w.dtype))
        weights[name] = (wide_w - rate * (updates[name] + decays[name] * wide_w)).astype(w.dtype)
    first = {name: mu[name].astype(m.dtype) for name, m in state.first.items()}
    second = {name: nu[name].astype(m.dtype) for name, m in state.second.items()}
    return state._replace(weights=weights, first=first, second=second, step=cast(jax.Array, after.count)), norm
