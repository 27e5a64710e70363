"""The core's table of dtypes (``core/model/precision.py``) as JAX dtypes, for a given dtype of the computation."""

from __future__ import annotations

import jax.numpy as jnp

from shardwright.core.model.precision import PRECISION, Word, dtype_of


def computed(what: str, computation: jnp.dtype) -> jnp.dtype:
    """The dtype in which a device computes ``what``.

    >>> computed("norm", jnp.dtype("bfloat16")).name
    'float32'
    """
    return _dtype(PRECISION[what].computed, computation)


def kept(what: str, computation: jnp.dtype) -> jnp.dtype:
    """The dtype of the result that is passed on."""
    return _dtype(PRECISION[what].kept, computation)


def _dtype(word: Word | None, computation: jnp.dtype) -> jnp.dtype:
    assert word is not None
    return jnp.dtype(dtype_of(word, computation=computation.name))
