"""The core's table of dtypes (``core/model/precision.py``) as JAX has them, where the computation's is known."""

from __future__ import annotations

import jax.numpy as jnp

from shardwright.core.model.precision import PRECISION, Word, dtype_of


def computed(what: str, computation: jnp.dtype) -> jnp.dtype:
    """The dtype in which a device computes it.

    >>> computed("norm", jnp.dtype("bfloat16")).name
    'float32'
    """
    return _meant(PRECISION[what].computed, computation)


def kept(what: str, computation: jnp.dtype) -> jnp.dtype:
    """The dtype in which the result is given on."""
    return _meant(PRECISION[what].kept, computation)


def _meant(word: Word | None, computation: jnp.dtype) -> jnp.dtype:
    assert word is not None
    return jnp.dtype(dtype_of(word, computation=computation.name))
