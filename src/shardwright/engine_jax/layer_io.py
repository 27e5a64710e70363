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

from shardwright.core.plan import Plan
from shardwright.core.table import ModelTable

Place = Callable[[str, jax.Array], jax.Array]
Use = Callable[[str, jax.Array], jax.Array]
Params = Mapping[str, jax.Array]


class Pieces(NamedTuple):
    """A dim that the layout cuts into ``num`` pieces, by these mesh axes, major first."""

    num: int = 1
    axes: tuple[str, ...] = ()


class Cuts(NamedTuple):
    """What the mathematics must know of a layout, where each piece of a dim computes something of its own.

    ``groups``: pieces of a row whose tokens are dispatched to experts together. ``queries``: of a row of queries.
    ``vocab``: of the embedding's rows. No result depends on them, but for the order of sums.
    """

    groups: int = 1
    queries: Pieces = Pieces()
    vocab: Pieces = Pieces()


WHOLE = Cuts()
"""One device."""


def cuts_of(plan: Plan) -> Cuts:
    """The cuts of a plan."""

    def pieces(tensor: str, logical_axis: str) -> Pieces:
        axes = plan.mesh.larger_than_one(plan.by_name[tensor].in_use.axes_of(logical_axis))
        return Pieces(num=plan.mesh.size(axes), axes=axes)

    return Cuts(
        groups=plan.sizes.get("groups", 1),
        queries=pieces("attention.queries", "length"),
        vocab=pieces("embedding.tokens", "vocab"),
    )


def stay(name: str, array: jax.Array) -> jax.Array:
    """The ``place`` of one device."""
    del name
    return array


def cast_for_use(table: ModelTable, dtype: jnp.dtype) -> Use:
    """The ``use`` of one device: the computation's dtype, but for weights that have their own (norms, routers)."""
    dtypes = {weight.name: jnp.dtype(weight.in_use_dtype or dtype) for weight in table.weights}
    return lambda name, array: array.astype(dtypes[name])
