"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this device.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.engine_jax.io.dtypes import computed, kept
from shardwright.engine_jax.io.layer_io import InUse, Links
from shardwright.engine_jax.layers.product import weight_product
from shardwright.engine_jax.precision.operands import input_amaxes


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


def feed_forward(x_BLM: jax.Array, weights: InUse, name: str, links: Links) -> jax.Array:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)

    amaxes = input_amaxes(x_BLM, (links.low.get(f"{name}.{of}") for of in ("gate", "up")))

    def product(dims: str, x: jax.Array, of: str) -> jax.Array:
        return weight_product(dims, x, weights[f"{name}.{of}"], low=links.low.get(f"{name}.{of}"), amaxes=amaxes)

    gate_BLF, up_BLF = (checkpoint_name(product("BLM,MF->BLF", x_BLM, of), f"{name}.{of}") for of in ("gate", "up"))
    hidden_BLF = checkpoint_name(hidden_units(gate_BLF, up_BLF), f"{name}.hidden")
    out_BLM = weight_product("BLF,FM->BLM", hidden_BLF, weights[f"{name}.down"], low=links.low.get(f"{name}.down"))
    return links.move(f"{name}.projected", "residual.stream", out_BLM)
