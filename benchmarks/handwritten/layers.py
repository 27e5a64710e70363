"""Layers that the three families share.

B rows, L tokens, S tokens as keys, M embed, H heads, K KV heads, G = H / K, D head dim, E value dim, P pairs, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.handwritten.sharding import Layout

Arrays = dict[str, jax.Array]


def rms_norm(x_BLM: jax.Array, scale_M: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square, times a scale, in float32."""
    wide = x_BLM.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * scale_M.reshape((1,) * (normed.ndim - 1) + (-1,))).astype(x_BLM.dtype)


def cos_and_sin(
    frequencies: tuple[float, ...], amplitude: float, positions_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, BLP."""
    turn_BLP = positions_BL[..., None] * jnp.array(frequencies, jnp.float32)[None, None]
    return jnp.cos(turn_BLP) * amplitude, jnp.sin(turn_BLP) * amplitude


def rotate(x_BLHD: jax.Array, cos_sin: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Rotary embedding of the last dim."""
    cos, sin = (each[:, :, None] for each in cos_sin)
    wide = x_BLHD.astype(jnp.float32)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHD.dtype)


def visible(segments_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
    """Attention mask, BLS: each query attends to keys of its own document, up to itself."""
    same = segments_BL[:, :, None] == segments_BL[:, None]
    return same & (positions_BL[:, :, None] >= positions_BL[:, None])


def attend(q_BLHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask_BLS: jax.Array, scale: float) -> jax.Array:
    """Softmax attention, BLHE, scores in float32."""
    B, L, H, D = q_BLHD.shape
    K = k_BSKD.shape[2]
    q_BLKGD = q_BLHD.reshape(B, L, K, H // K, D)
    scores = jnp.einsum("BLKGD,BSKD->BKGLS", q_BLKGD, k_BSKD, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask_BLS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v_BSKE.dtype)
    return jnp.einsum("BKGLS,BSKE->BLKGE", shares, v_BSKE).reshape(B, L, H, -1)


def grouped_attention(
    x_BLM: jax.Array, w: Arrays, cos_sin: tuple[jax.Array, jax.Array], mask_BLS: jax.Array, layout: Layout
) -> jax.Array:
    """Grouped-query attention, BLM."""
    q = rotate(jnp.einsum("BLM,MHD->BLHD", x_BLM, w["attention.q"]), cos_sin)
    k = rotate(jnp.einsum("BLM,MKD->BLKD", x_BLM, w["attention.k"]), cos_sin)
    v = jnp.einsum("BLM,MKD->BLKD", x_BLM, w["attention.v"])
    q, k, v = (layout.constrain(each, layout.batch, (), layout.tensor, ()) for each in (q, k, v))
    out = attend(q, k, v, mask_BLS, q.shape[-1] ** -0.5)
    return jnp.einsum("BLHD,HDM->BLM", out, w["attention.o"])


def swiglu(x_BLM: jax.Array, w: Arrays, name: str, layout: Layout) -> jax.Array:
    """The gated feed-forward layer, BLM."""
    gate = jnp.einsum("BLM,MF->BLF", x_BLM, w[f"{name}.gate"])
    hidden = jax.nn.silu(gate) * jnp.einsum("BLM,MF->BLF", x_BLM, w[f"{name}.up"])
    return jnp.einsum("BLF,FM->BLM", layout.constrain(hidden, layout.batch, (), layout.tensor), w[f"{name}.down"])


def mean_cross_entropy(x_BLM: jax.Array, kernel_MV: jax.Array, batch: Arrays, layout: Layout) -> jax.Array:
    """Mean over valid tokens of minus the target's log-probability, in float32."""
    scores = jnp.einsum("BLM,MV->BLV", x_BLM, kernel_MV, preferred_element_type=jnp.float32)
    scores = layout.constrain(scores, layout.batch, (), layout.tensor)
    total = jax.nn.logsumexp(scores, axis=-1)
    # By comparison, because a lookup would all-gather a sharded vocabulary.
    if layout.tensor:
        is_target = jnp.arange(scores.shape[-1])[None, None] == batch["targets"][..., None]
        picked = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    else:
        picked = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum((total - picked) * batch["valid"]) / jnp.maximum(jnp.sum(batch["valid"]), 1)


def scanned(layer, x_BLM: jax.Array, params: Arrays, prefix: str) -> tuple[jax.Array, jax.Array]:
    """A stack of layers in a loop, each recomputed in the backward pass."""
    stack = {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}
    return jax.lax.scan(
        jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False), x_BLM, stack
    )
