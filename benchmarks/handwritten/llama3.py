"""Llama 3 by hand: grouped-query attention, SwiGLU. B rows, L tokens, M embed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.handwritten.layers import (
    Arrays,
    cos_and_sin,
    grouped_attention,
    mean_cross_entropy,
    rms_norm,
    scanned,
    swiglu,
    visible,
)
from benchmarks.handwritten.sharding import Layout, gathered


class Numbers(NamedTuple):
    """Numbers that do not follow from the shapes of the weights."""

    eps: float
    frequencies: tuple[float, ...]
    dtype: jnp.dtype


def loss(params: Arrays, batch: Arrays, numbers: Numbers, layout: Layout) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy of a batch; there are no token counts."""
    rows, between = layout.batch, layout.tensor

    def layer(x_BLM: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        w = gathered(layout, w, numbers.dtype)
        h = layout.constrain(rms_norm(x_BLM, w["residual.attention_norm"], numbers.eps), rows, (), ())
        x_BLM = x_BLM + layout.constrain(grouped_attention(h, w, cos_sin, mask, layout), rows, between, ())
        h = layout.constrain(rms_norm(x_BLM, w["residual.feed_forward_norm"], numbers.eps), rows, (), ())
        return x_BLM + layout.constrain(swiglu(h, w, "mlp", layout), rows, between, ()), None

    cos_sin = cos_and_sin(numbers.frequencies, 1.0, batch["positions"])
    mask = visible(batch["segments"], batch["positions"])
    ends = {name: params[name] for name in ("embedding.tokens", "logits.kernel") if name in params}
    ends = gathered(layout, ends, numbers.dtype)
    x = layout.constrain(ends["embedding.tokens"][batch["tokens"]], rows, between, ())
    x, _ = scanned(layer, x, params, "layers.")
    x = layout.constrain(rms_norm(x, params["residual.final_norm"], numbers.eps), rows, (), ())
    kernel = ends["logits.kernel"] if "logits.kernel" in ends else ends["embedding.tokens"].T
    return mean_cross_entropy(x, kernel, batch, layout), {}
