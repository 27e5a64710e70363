"""A training step for any of the losses: AdamW with warm-up, cosine decay and clipping, from optax.

Biases of routers are no weights: they move by the counts, as DeepSeek-V3 moves them (arXiv:2412.19437, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.handwritten.layers import Arrays
from benchmarks.handwritten.sharding import Layout

BIAS_RATE = 1e-3


class Options(NamedTuple):
    """Hyperparameters of AdamW: peak learning rate, warm-up steps, decay steps, weight decay of matrices, largest norm."""

    lr: float
    warmup: int
    steps: int
    weight_decay: float
    clip: float


class TrainState(NamedTuple):
    """Weights, optimizer state, and the routers' biases."""

    weights: dict[str, Any]
    optimizer: Any
    biases: dict[str, Any]


class Metrics(NamedTuple):
    """Mean loss, and the norm of its gradients before clipping."""

    loss: Any
    grad_norm: Any


def adamw(options: Options, decayed: frozenset[str]) -> optax.GradientTransformation:
    """The optimizer; the first update uses the learning rate of step 1."""

    def is_decayed(weights: Any) -> Any:
        return {name: name in decayed for name in weights}

    rate = optax.warmup_cosine_decay_schedule(0.0, options.lr, options.warmup, options.steps, options.lr * 0.1)
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            lambda count: rate(count + 1),
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=options.weight_decay,
            mask=is_decayed,
        ),
    )


def state_places(
    optimizer: optax.GradientTransformation, weights: Arrays, biases: Arrays, layout: Layout
) -> TrainState:
    """Shardings of the full state: moments as their weights, counters replicated."""
    places = {name: array.sharding for name, array in weights.items()}
    whole = layout.sharding()
    shapes = jax.eval_shape(optimizer.init, weights)
    kept = optax.tree_utils.tree_map_params(
        optimizer, lambda _, place: place, shapes, places, transform_non_params=lambda _: whole
    )
    return TrainState(places, kept, {name: array.sharding for name, array in biases.items()})


def train_step(
    loss: Callable[[Arrays, Arrays], tuple[jax.Array, Arrays]],
    optimizer: optax.GradientTransformation,
    places: TrainState,
    layout: Layout,
) -> jax.stages.Wrapped:
    """``step(state, batch) -> (state, metrics)``; the given state is donated."""

    def step(state: TrainState, batch: Arrays) -> tuple[TrainState, Metrics]:
        def of_weights(weights: Arrays) -> tuple[jax.Array, Arrays]:
            return loss({**weights, **state.biases}, batch)

        (value, counts), gradients = jax.value_and_grad(of_weights, has_aux=True)(state.weights)
        updates, kept = optimizer.update(gradients, state.optimizer, state.weights)
        biases = {name: _moved(bias, counts[name.split(".", 1)[0]]) for name, bias in state.biases.items()}
        weights: Any = optax.apply_updates(state.weights, updates)
        return TrainState(weights, kept, biases), Metrics(value, optax.tree.norm(gradients))

    whole = layout.sharding()
    return jax.jit(
        step,
        in_shardings=(places, layout.sharding(layout.batch, ())),
        out_shardings=(places, Metrics(whole, whole)),
        donate_argnums=0,
    )


def _moved(bias_NE: jax.Array, counts_NE: jax.Array) -> jax.Array:
    load = counts_NE.astype(jnp.float32)
    return bias_NE + BIAS_RATE * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
