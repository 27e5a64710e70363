"""Scans over the layers of a stack: one, or one for each run of layers that are computed alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.layer_io import Params, Site, gradient_of, with_gradient
from shardwright.engine_jax.layers.order import zeros_after

Out = TypeVar("Out")
Layer = Callable[[jax.Array, Params, Site | None], tuple[jax.Array, Out]]
"""``layer(x, weights, site)``: the layer's output, and what is kept of each layer."""


def scanned(
    layer_of: Callable[[range], Layer[Out]],
    x: jax.Array,
    stacked: Params,
    sites_of: Callable[[range], Site | None],
    runs: Sequence[range],
    again_of: Callable[[range], Callable[[Any], Any]],
) -> tuple[jax.Array, Out]:
    """All layers of a stack, and what is kept of them along a leading dim. ``layer_of``: that of a run. ``stacked``: their weights.
    ``sites_of``: the sites of a run's layers, stacked. ``again_of``: from a run's layer to one whose backward pass makes again what is
    not kept.

    The gradients of a stack are one array, into which the backward pass writes those of each layer. Several runs read the stack at the
    number of each layer: slices of the weights would be copies.
    """
    values, kept = jax.lax.stop_gradient(stacked), []
    gradients = {name: gradient_of(one) for name, one in stacked.items()}
    for run in runs:
        of_run, again, alone = layer_of(run), again_of(run), len(run) == 1 < len(runs)
        if alone:
            # What it reads of the stacks comes before the barrier, which would copy them.
            of_run = again(of_run)

        def one_layer(
            carry: tuple[jax.Array, Mapping[str, jax.Array]],
            place: tuple[jax.Array, Params | None, Site | None],
            layer: Layer[Out] = of_run,
        ) -> tuple[tuple[jax.Array, Mapping[str, jax.Array]], Out]:
            (x, gradients), (number, read, site) = carry, place
            if read is None:
                read = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False), values)
            linked = {name: _linked(gradient_of(one), number, gradients[name]) for name, one in read.items()}
            weights = {name: with_gradient(one, linked[name][0]) for name, one in read.items()}
            x, out = layer(x, weights, site)
            return (x, {name: rest for name, (_, rest) in linked.items()}), out

        places = (jnp.asarray(run), values if len(runs) == 1 else None, sites_of(run))
        (x, gradients), out = jax.lax.scan(one_layer if alone else again(one_layer), (x, gradients), places)
        kept.append(out)
    x = _after_the_last(x, gradients)
    return x, kept[0] if len(kept) == 1 else jax.tree.map(lambda *of_runs: jnp.concatenate(of_runs), *kept)


@jax.custom_vjp
def _linked(of_layer: jax.Array, number: jax.Array, of_stack: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both arrays as they are; the cotangent of the layer is written into that of its stack."""
    del number
    return of_layer, of_stack


def _write(number: jax.Array, cotangents: tuple[jax.Array, jax.Array]) -> tuple[None, None, jax.Array]:
    of_layer, of_stack = cotangents
    return None, None, jax.lax.dynamic_update_index_in_dim(of_stack, of_layer, number, 0)


_linked.defvjp(lambda of_layer, number, of_stack: (_linked(of_layer, number, of_stack), number), _write)


@jax.custom_vjp
def _after_the_last(x: jax.Array, gradients: Mapping[str, jax.Array]) -> jax.Array:
    """The output of the last layer. Its cotangent comes before the zeros into which the layers' gradients are written."""
    del gradients
    return x


_after_the_last.defvjp(lambda x, gradients: (x, gradients), lambda like, cotangent: zeros_after(cotangent, like))
