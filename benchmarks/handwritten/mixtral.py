"""Mixtral by hand: grouped-query attention, softmax routing. B rows, L tokens, M embed, E experts, N layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.handwritten.experts import experts
from benchmarks.handwritten.layers import (
    Arrays,
    cos_and_sin,
    grouped_attention,
    mean_cross_entropy,
    rms_norm,
    scanned,
    visible,
)
from benchmarks.handwritten.sharding import Layout, gathered


class Numbers(NamedTuple):
    """Numbers that do not follow from the shapes of the weights."""

    eps: float
    frequencies: tuple[float, ...]
    dtype: jnp.dtype
    top_k: int
    capacity_factor: float | None


def route(x_BLM: jax.Array, kernel_ME: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights, both BLK."""
    products = jnp.einsum("BLM,ME->BLE", x_BLM.astype(jnp.float32), kernel_ME, precision=jax.lax.Precision.HIGHEST)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(products, axis=-1), top_k)
    return chosen, shares / jnp.sum(shares, axis=-1, keepdims=True)


def loss(params: Arrays, batch: Arrays, numbers: Numbers, layout: Layout) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy of a batch, and the tokens routed to each expert, by stack, NE."""
    rows, eps = layout.batch, numbers.eps

    def layer(x_BLM: jax.Array, w: Arrays) -> tuple[jax.Array, jax.Array]:
        kernel = w["router.kernel"]
        w = gathered(layout, w, numbers.dtype)
        h = rms_norm(x_BLM, w["residual.attention_norm"], eps)
        x_BLM = x_BLM + layout.constrain(grouped_attention(h, w, cos_sin, mask, layout), rows, (), ())
        h = rms_norm(x_BLM, w["residual.feed_forward_norm"], eps)
        chosen, shares = route(h, layout.constrain(kernel, (), ()), numbers.top_k)
        added, counts = experts(h, chosen, shares, batch["segments"] > 0, w, numbers.capacity_factor, layout)
        return x_BLM + layout.constrain(added, rows, (), ()), counts

    cos_sin = cos_and_sin(numbers.frequencies, 1.0, batch["positions"])
    mask = visible(batch["segments"], batch["positions"])
    ends = {name: params[name] for name in ("embedding.tokens", "logits.kernel")}
    ends = gathered(layout, ends, numbers.dtype)
    x = layout.constrain(ends["embedding.tokens"][batch["tokens"]], rows, (), ())
    x, counts_NE = scanned(layer, x, params, "layers.")
    x = rms_norm(x, params["residual.final_norm"], eps)
    return mean_cross_entropy(x, ends["logits.kernel"], batch, layout), {"layers": counts_NE}
