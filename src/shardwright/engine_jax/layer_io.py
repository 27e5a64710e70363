"""How the mathematics and the layout meet: two callbacks, which do nothing on one device.

``place(name, array)`` is called on every named activation of the table, at the points where its layout may
change; the engine constrains it to the plan's spec. ``use(name, array)`` brings one layer of a weight from
rest into use: cast, and gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.table import ModelTable

Place = Callable[[str, jax.Array], jax.Array]
Use = Callable[[str, jax.Array], jax.Array]
Params = Mapping[str, jax.Array]


class Pieces(NamedTuple):
    """How the layout cuts a row of queries: into ``num`` pieces, by these mesh axes, major first."""

    num: int = 1
    axes: tuple[str, ...] = ()


def stay(name: str, array: jax.Array) -> jax.Array:
    """The ``place`` of one device."""
    del name
    return array


def cast_for_use(table: ModelTable, dtype: jnp.dtype) -> Use:
    """The ``use`` of one device: the computation's dtype, but for weights that have their own (norms, routers)."""
    dtypes = {weight.name: jnp.dtype(weight.in_use_dtype or dtype) for weight in table.weights}
    return lambda name, array: array.astype(dtypes[name])
