"""Experts by hand; the compiler moves tokens to satisfy sharding constraints. By index with a capacity, dense without.

B rows, L tokens, K experts of a token, E experts, C slots of an expert and row, M embed, F hidden units.
"""

from __future__ import annotations

from math import ceil

import jax
import jax.numpy as jnp

from benchmarks.handwritten.layers import Arrays
from benchmarks.handwritten.sharding import Layout


def experts(
    x_BLM: jax.Array,
    chosen_BLK: jax.Array,
    weights_BLK: jax.Array,
    valid_BL: jax.Array,
    w: Arrays,
    capacity_factor: float | None,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """The experts' weighted sum, BLM, and the number of tokens routed to each, E."""
    E = w["moe.gate"].shape[0]
    is_chosen_BLKE = jax.nn.one_hot(chosen_BLK, E, dtype=jnp.int32) * valid_BL[..., None, None]
    counts_E = jnp.sum(is_chosen_BLKE, axis=(0, 1, 2))
    if capacity_factor is None:
        return _all_of_them(x_BLM, is_chosen_BLKE, weights_BLK, w, layout), counts_E
    C = ceil(capacity_factor * chosen_BLK.shape[-1] * x_BLM.shape[1] / E)
    return _in_slots(x_BLM, chosen_BLK, is_chosen_BLKE, weights_BLK, w, C, layout), counts_E


def _all_of_them(
    x_BLM: jax.Array, is_chosen_BLKE: jax.Array, weights_BLK: jax.Array, w: Arrays, layout: Layout
) -> jax.Array:
    """Every expert processes every token, with weight 0 if the token is not routed to it: no token is dropped."""
    rows = tuple(axis for axis in layout.batch if axis not in layout.expert)
    weights_BLE = jnp.einsum("BLKE,BLK->BLE", is_chosen_BLKE.astype(jnp.float32), weights_BLK)
    x_BLM = layout.constrain(x_BLM, rows, (), ())
    weights_BLE = layout.constrain(weights_BLE, rows, (), layout.expert)
    gate = jnp.einsum("BLM,EMF->BELF", x_BLM, w["moe.gate"])
    hidden = jax.nn.silu(gate) * jnp.einsum("BLM,EMF->BELF", x_BLM, w["moe.up"])
    hidden = layout.constrain(hidden, rows, layout.expert, (), ())
    weighted = hidden * weights_BLE.swapaxes(1, 2)[..., None].astype(hidden.dtype)
    return layout.constrain(jnp.einsum("BELF,EFM->BLM", weighted, w["moe.down"]), layout.batch, (), ())


def _in_slots(
    x_BLM: jax.Array,
    chosen_BLK: jax.Array,
    is_chosen_BLKE: jax.Array,
    weights_BLK: jax.Array,
    w: Arrays,
    C: int,
    layout: Layout,
) -> jax.Array:
    """Each expert takes the first ``C`` tokens of a row that are routed to it."""
    B, L, M = x_BLM.shape
    E = is_chosen_BLKE.shape[-1]
    rows = tuple(axis for axis in layout.batch if axis not in layout.expert)
    is_chosen_BLE = jnp.sum(is_chosen_BLKE, axis=2)
    before_BLE = jnp.cumsum(is_chosen_BLE, axis=1) - is_chosen_BLE
    place_BLK = jnp.take_along_axis(before_BLE, chosen_BLK, axis=-1)
    kept_BLK = (place_BLK < C) & (jnp.sum(is_chosen_BLKE, axis=-1) > 0)
    slot_BLK = jnp.where(kept_BLK, chosen_BLK * C + place_BLK, E * C)

    def of_slots(slot_LK: jax.Array) -> jax.Array:
        token_LK = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[:, None], slot_LK.shape)
        return jnp.full(E * C, L, jnp.int32).at[slot_LK].set(token_LK, mode="drop")

    token_BS = jax.vmap(of_slots)(slot_BLK)
    x_BSM = jax.vmap(lambda x, token: x.at[token].get(mode="fill", fill_value=0))(x_BLM, token_BS)
    x_BECM = layout.constrain(x_BSM.reshape(B, E, C, M), layout.batch, (), (), ())
    x_BECM = layout.constrain(x_BECM, rows, layout.expert, (), ())
    hidden = jax.nn.silu(jnp.einsum("BECM,EMF->BECF", x_BECM, w["moe.gate"]))
    hidden = hidden * jnp.einsum("BECM,EMF->BECF", x_BECM, w["moe.up"])
    y_BECM = layout.constrain(jnp.einsum("BECF,EFM->BECM", hidden, w["moe.down"]), rows, layout.expert, (), ())
    y_BSM = layout.constrain(y_BECM, layout.batch, (), (), ()).reshape(B, E * C, M)
    y_BLKM = jax.vmap(lambda y, slot: y.at[slot].get(mode="fill", fill_value=0))(y_BSM, slot_BLK)
    return jnp.einsum("BLKM,BLK->BLM", y_BLKM, weights_BLK.astype(y_BLKM.dtype))
