"""DeepSeek-V3 by hand: latent attention, group-limited sigmoid routing, shared experts, a load-balancing bias.

B rows, L tokens, M embed, Q q_lora, N the compressed latent, H heads, D head dim, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.handwritten.experts import experts
from benchmarks.handwritten.layers import (
    Arrays,
    attend,
    cos_and_sin,
    mean_cross_entropy,
    rms_norm,
    rotate,
    scanned,
    swiglu,
    visible,
)
from benchmarks.handwritten.sharding import Layout, gathered


class Numbers(NamedTuple):
    """Numbers that do not follow from the shapes of the weights."""

    eps: float
    frequencies: tuple[float, ...]
    amplitude: float
    score_factor: float
    dtype: jnp.dtype
    nope_dim: int
    top_k: int
    num_groups: int
    chosen_groups: int
    routed_scale: float
    capacity_factor: float | None


def latent_attention(
    x_BLM: jax.Array,
    w: Arrays,
    cos_sin: tuple[jax.Array, jax.Array],
    mask_BLS: jax.Array,
    numbers: Numbers,
    layout: Layout,
) -> jax.Array:
    """Multi-head latent attention, BLM."""
    down = rms_norm(jnp.einsum("BLM,MQ->BLQ", x_BLM, w["attention.q_down"]), w["attention.q_norm"], numbers.eps)
    q_nope, q_rope = jnp.split(jnp.einsum("BLQ,QHD->BLHD", down, w["attention.q_up"]), [numbers.nope_dim], axis=-1)
    q = jnp.concatenate([q_nope, rotate(q_rope, cos_sin, interleaved=True)], axis=-1)
    N = w["attention.kv_norm"].shape[0]
    latent, k_rope = jnp.split(jnp.einsum("BLM,MR->BLR", x_BLM, w["attention.kv_down"]), [N], axis=-1)
    k_rope = rotate(k_rope[:, :, None], cos_sin, interleaved=True)
    latent = rms_norm(latent, w["attention.kv_norm"], numbers.eps)
    kv = jnp.einsum("BLN,NHD->BLHD", latent, w["attention.kv_up"])
    k_nope, v = jnp.split(kv, [numbers.nope_dim], axis=-1)
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    q, k, v = (layout.constrain(each, layout.batch, (), layout.tensor, ()) for each in (q, k, v))
    out = attend(q, k, v, mask_BLS, q.shape[-1] ** -0.5 * numbers.score_factor)
    return jnp.einsum("BLHD,HDM->BLM", out, w["attention.o"])


def route(x_BLM: jax.Array, kernel_ME: jax.Array, bias_E: jax.Array, numbers: Numbers) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights, both BLK: the best experts of the best groups."""
    logits = jnp.einsum("BLM,ME->BLE", x_BLM.astype(jnp.float32), kernel_ME, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    biased_scores = jax.lax.stop_gradient(scores) + bias_E[None, None]
    by_group = biased_scores.reshape(*biased_scores.shape[:2], numbers.num_groups, -1)
    of_groups = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
    best = jax.lax.top_k(of_groups, numbers.chosen_groups)[1]
    is_best = jnp.any(jax.nn.one_hot(best, numbers.num_groups, dtype=jnp.bool_), axis=-2)
    biased_scores = jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(biased_scores.shape)
    chosen = jax.lax.top_k(biased_scores, numbers.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20) * numbers.routed_scale


def loss(params: Arrays, batch: Arrays, numbers: Numbers, layout: Layout) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy of a batch, and the tokens routed to each expert, by stack."""
    rows, between, eps = layout.batch, layout.tensor, numbers.eps

    def attended(x_BLM: jax.Array, w: Arrays) -> jax.Array:
        h = layout.constrain(rms_norm(x_BLM, w["residual.attention_norm"], eps), rows, (), ())
        added = latent_attention(h, w, cos_sin, mask, numbers, layout)
        return x_BLM + layout.constrain(added, rows, between, ())

    def dense_layer(x_BLM: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        w = gathered(layout, w, numbers.dtype)
        x_BLM = attended(x_BLM, w)
        h = layout.constrain(rms_norm(x_BLM, w["residual.feed_forward_norm"], eps), rows, (), ())
        return x_BLM + layout.constrain(swiglu(h, w, "mlp", layout), rows, between, ()), None

    def moe_layer(x_BLM: jax.Array, w: Arrays) -> tuple[jax.Array, jax.Array]:
        kernel, bias = layout.constrain(w["router.kernel"], (), ()), jax.lax.stop_gradient(w["router.bias"])
        w = gathered(layout, w, numbers.dtype)
        x_BLM = attended(x_BLM, w)
        h = layout.constrain(rms_norm(x_BLM, w["residual.feed_forward_norm"], eps), rows, (), ())
        chosen, weights = route(h, kernel, bias, numbers)
        added, counts = experts(h, chosen, weights, batch["segments"] > 0, w, numbers.capacity_factor, layout)
        added = added + swiglu(h, w, "shared", layout)
        return x_BLM + layout.constrain(added, rows, between, ()), counts

    cos_sin = cos_and_sin(numbers.frequencies, numbers.amplitude, batch["positions"])
    mask = visible(batch["segments"], batch["positions"])
    ends = {name: params[name] for name in ("embedding.tokens", "logits.kernel")}
    ends = gathered(layout, ends, numbers.dtype)
    x = layout.constrain(ends["embedding.tokens"][batch["tokens"]], rows, between, ())
    x, _ = scanned(dense_layer, x, params, "dense_layers.")
    x, counts_NE = scanned(moe_layer, x, params, "moe_layers.")
    x = layout.constrain(rms_norm(x, params["residual.final_norm"], eps), rows, (), ())
    return mean_cross_entropy(x, ends["logits.kernel"], batch, layout), {"moe_layers": counts_NE}
