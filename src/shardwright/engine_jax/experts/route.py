"""The router: each token's top-k experts and their weights, by softmax, or by sigmoid limited to groups with a balancing bias.

B rows, L tokens, M embed, E experts, K experts of a token, N groups of experts, X experts of a group; Z layers
of a stack.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.program.primitives import Route
from shardwright.engine_jax.io.dtypes import kept
from shardwright.models.layers.ends import NO_DOCUMENT


def routed_tokens(segments_BL: jax.Array) -> jax.Array:
    """Which tokens are routed, BL: those of a document. Made once a step for all layers."""
    return segments_BL != NO_DOCUMENT


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    experts_BLK: jax.Array
    weights_BLK: jax.Array


def route(
    products_BLE: jax.Array, routed_BL: jax.Array, bias_E: jax.Array | None, form: Route, names: tuple[str, str]
) -> Routing:
    """Route each token. ``products_BLE``: of the tokens and the router's weight. ``routed_BL``: ``routed_tokens``; others have the number of
    an expert that there is not. ``bias_E`` affects which experts are chosen and not their weights. ``names``: of both results.

    Source: arXiv:2412.19437, equations 12 to 16; arXiv:2401.04088, section 2.1.
    """
    num, sigmoid = products_BLE.shape[-1], form.scoring == "sigmoid"
    scores_BLE = jax.nn.sigmoid(products_BLE) if sigmoid else jax.nn.softmax(products_BLE, axis=-1)
    ranked_BLE = jax.lax.stop_gradient(scores_BLE)
    if bias_E is not None:
        ranked_BLE = ranked_BLE + jax.lax.stop_gradient(bias_E.astype(products_BLE.dtype))[None, None]
    if form.num_groups > 1:
        ranked_BLE = _in_best_groups(ranked_BLE, form, best_of_group=2 if sigmoid else 1)
    _, experts_BLK = top_k(ranked_BLE, form.top_k)
    # Masked sums instead of a gather: their gradient is a masked sum too, not a scatter.
    is_chosen_BLKE = experts_BLK[..., None] == jnp.arange(num, dtype=jnp.int32)[None, None, None]
    weights_BLK = jnp.sum(jnp.where(is_chosen_BLKE, scores_BLE[:, :, None], 0.0), axis=-1)
    if form.normalized:
        weights_BLK = weights_BLK / (jnp.sum(weights_BLK, axis=-1, keepdims=True) + 1e-20)
    weights_BLK = (weights_BLK * form.scale).astype(kept("router", products_BLE.dtype))
    # The backward pass reads the experts of all tokens, also of those that are not routed.
    experts_BLK, weights_BLK = (
        checkpoint_name(x, name) for x, name in zip((experts_BLK, weights_BLK), names, strict=True)
    )
    return Routing(jnp.where(routed_BL[..., None], experts_BLK, num), weights_BLK)


def top_k(x: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The ``num`` largest entries along the last dim, with their indices (int32), largest first, ties by index.

    A few maxima over a few experts cost less than ``lax.top_k``, which sorts.
    """
    values, indices = [], []
    numbers = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    for _ in range(num):
        index = jnp.argmax(x, axis=-1, keepdims=True).astype(jnp.int32)
        values.append(jnp.max(x, axis=-1, keepdims=True))
        indices.append(index)
        x = jnp.where(numbers == index, -jnp.inf, x)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(indices, axis=-1)


def updated_bias(bias_ZE: jax.Array, counts_ZE: jax.Array, rate: float) -> jax.Array:
    """The balancing bias after a step: plus ``rate`` for experts below the mean load, minus ``rate`` for those above it.

    ``counts_ZE``: the assignments of each expert of each layer in the global step.
    Source: arXiv:2408.15664, algorithm 1.
    """
    counts_ZE = counts_ZE.astype(jnp.float32)
    violation_ZE = jnp.mean(counts_ZE, axis=-1, keepdims=True) - counts_ZE
    return bias_ZE + rate * jnp.sign(violation_ZE).astype(bias_ZE.dtype)


def _in_best_groups(scores_BLE: jax.Array, form: Route, best_of_group: int) -> jax.Array:
    """The scores, with minus infinity for experts outside the best groups."""
    scores_BLNX = scores_BLE.reshape(*scores_BLE.shape[:-1], form.num_groups, -1)
    best, _ = top_k(scores_BLNX, best_of_group)
    group_BLN = jnp.sum(best, axis=-1)
    _, chosen = top_k(group_BLN, form.chosen_groups)
    is_chosen_BLN = jnp.any(chosen[..., None] == jnp.arange(form.num_groups)[None, None, None], axis=-2)
    return jnp.where(is_chosen_BLN[..., None], scores_BLNX, -jnp.inf).reshape(scores_BLE.shape)
