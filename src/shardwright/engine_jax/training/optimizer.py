"""AdamW with warm-up, cosine decay and clipping by the global norm, made of optax transformations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax

from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.training.state import State
from shardwright.training.optimizer import BETA_1, BETA_2, EPSILON, Arithmetic, OptimizerOptions, learning_rate

Arrays = Mapping[str, jax.Array]


OF_ARRAYS = Arithmetic(cos=jnp.cos, least=jnp.minimum, most=jnp.maximum)


def apply_gradients(
    state: State[jax.Array], gradients: Arrays, options: OptimizerOptions, decayed: frozenset[str]
) -> tuple[State[jax.Array], jax.Array]:
    """The state after one step, with its buffers unchanged, and the global norm of the gradients before clipping.

    Moments and weights keep their own dtypes. Weights named in ``decayed`` also decay by the learning
    rate times the weight decay.
    """
    gradients = {name: g.astype(computed("clipping", g.dtype)) for name, g in gradients.items()}
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, options.clip / jnp.maximum(norm, 1e-30))
    gradients = {name: g * factor for name, g in gradients.items()}
    adam = optax.scale_by_adam(b1=BETA_1, b2=BETA_2, eps=EPSILON)
    wide = [
        {name: m.astype(computed("moments", m.dtype)) for name, m in moments.items()}
        for moments in (state.first, state.second)
    ]
    before = optax.ScaleByAdamState(count=state.step, mu=wide[0], nu=wide[1])
    updates, after = cast(tuple[Arrays, optax.ScaleByAdamState], adam.update(gradients, before))
    mu, nu = cast(Arrays, after.mu), cast(Arrays, after.nu)
    rate = learning_rate(options, state.step, OF_ARRAYS)
    decays = {name: options.weight_decay if name in decayed else 0.0 for name in state.weights}
    weights = {}
    for name, w in state.weights.items():
        wide_w = w.astype(computed("update", w.dtype))
        weights[name] = (wide_w - rate * (updates[name] + decays[name] * wide_w)).astype(w.dtype)
    first = {name: mu[name].astype(m.dtype) for name, m in state.first.items()}
    second = {name: nu[name].astype(m.dtype) for name, m in state.second.items()}
    return state._replace(weights=weights, first=first, second=second, step=cast(jax.Array, after.count)), norm
