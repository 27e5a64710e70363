"""Llama 3 by hand: grouped queries, SwiGLU. B rows, L tokens, M embed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.handwritten.layers import (
    Arrays,
    grouped_attention,
    mean_cross_entropy,
    rms_norm,
    scanned,
    swiglu,
    turns,
    visible,
)
from benchmarks.handwritten.sharding import Layout, gathered


class Numbers(NamedTuple):
    """What the shapes of the weights do not tell."""

    eps: float
    frequencies: tuple[float, ...]
    dtype: jnp.dtype


def loss(params: Arrays, batch: Arrays, numbers: Numbers, layout: Layout) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy of a batch; nothing is counted."""
    rows, between = layout.batch, layout.tensor

    def layer(x_BLM: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        w = gathered(layout, w, numbers.dtype)
        h = layout.cut(rms_norm(x_BLM, w["residual.attention_norm"], numbers.eps), rows, (), ())
        x_BLM = x_BLM + layout.cut(grouped_attention(h, w, turned_by, mask, layout), rows, between, ())
        h = layout.cut(rms_norm(x_BLM, w["residual.feed_forward_norm"], numbers.eps), rows, (), ())
        return x_BLM + layout.cut(swiglu(h, w, "mlp", layout), rows, between, ()), None

    turned_by = turns(numbers.frequencies, 1.0, batch["positions"])
    mask = visible(batch["segments"], batch["positions"])
    ends = {name: params[name] for name in ("embedding.tokens", "logits.kernel") if name in params}
    ends = gathered(layout, ends, numbers.dtype)
    x = layout.cut(ends["embedding.tokens"][batch["tokens"]], rows, between, ())
    x, _ = scanned(layer, x, params, "layers.")
    x = layout.cut(rms_norm(x, params["residual.final_norm"], numbers.eps), rows, (), ())
    kernel = ends["logits.kernel"] if "logits.kernel" in ends else ends["embedding.tokens"].T
    return mean_cross_entropy(x, kernel, batch, layout), {}
