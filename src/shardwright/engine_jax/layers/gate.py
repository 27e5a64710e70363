"""Gated hidden units (arXiv:2002.05202)."""

from __future__ import annotations

import jax

from shardwright.engine_jax.io.dtypes import computed, kept


@jax.custom_vjp
def silu(gate: jax.Array) -> jax.Array:
    """``gate`` times its sigmoid. Only ``gate`` is saved for the backward pass, in its own dtype."""
    return jax.nn.silu(gate.astype(computed("hidden", gate.dtype))).astype(kept("hidden", gate.dtype))


def _silu_backward(gate: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = gate.astype(computed("hidden", gate.dtype))
    sigmoid = jax.nn.sigmoid(wide)
    return ((cotangent.astype(wide.dtype) * sigmoid * (1 + wide * (1 - sigmoid))).astype(cotangent.dtype),)


silu.defvjp(lambda gate: (silu(gate), gate), _silu_backward)


@jax.custom_vjp
def hidden_units(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``. Only these two are saved for the backward pass."""
    return silu(gate) * up


hidden_units.defvjp(
    lambda gate, up: (hidden_units(gate, up), (gate, up)),
    lambda given, cotangent: jax.vjp(lambda gate, up: silu(gate) * up, *given)[1](cotangent),
)
