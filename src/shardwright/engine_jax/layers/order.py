"""In which order the backward pass makes its arrays, where compilers would choose one that needs more memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zeros_after(cotangent: jax.Array, like: Any) -> tuple[jax.Array, Any]:
    """The cotangent as it is, and zeros of the shapes and dtypes of ``like``, a pytree, that are made once it is there.

    Compilers make what depends on nothing before the forward pass, and hold it beside the logits.
    """
    scalars = jax.tree.map(lambda one: jnp.zeros((), one.dtype), like)
    # A barrier of whole arrays would order what comes after them, and not their zeros.
    cotangent, scalars = jax.lax.optimization_barrier((cotangent, scalars))
    return cotangent, jax.tree.map(lambda scalar, one: jnp.broadcast_to(scalar, one.shape), scalars, like)


@jax.custom_vjp
def weight_first(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are. In the backward pass nothing goes on from ``x`` before the weight's gradient is there.

    For the logits: XLA for GPUs makes that gradient after all layers, and holds the logits' cotangent until then.
    """
    return x, weight


weight_first.defvjp(
    lambda x, weight: ((x, weight), None), lambda _, cotangents: jax.lax.optimization_barrier(cotangents)
)
