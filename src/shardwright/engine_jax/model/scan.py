"""Scans over the layers of a stack: one, or one for each run of layers that are computed alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.layer_io import AtRest, Params, Site, WithGradient
from shardwright.engine_jax.layers.product import PRODUCT

Out = TypeVar("Out")
Layer = Callable[[jax.Array, Params, Site | None], tuple[jax.Array, Out]]
"""``layer(x, weights, site)``: the layer's output, and what is kept of each layer."""


def scanned(
    layer_of: Callable[[range], Layer[Out]],
    x: jax.Array,
    stacked: Params,
    sites_of: Callable[[range], Site | None],
    runs: Sequence[range],
    remat: str,
) -> tuple[jax.Array, Out]:
    """All layers of a stack, and what is kept of them along a leading dim. ``layer_of``: that of a run. ``stacked``: their weights.
    ``sites_of``: the sites of a run's layers, stacked.

    Slices of the weights and of their gradients would be copies. So several runs read the stack at the number of each layer, and the
    backward pass of each writes the gradients of its layers into the same arrays.
    """
    if len(runs) == 1:
        # The scan already prevents XLA from merging the recomputation with the forward pass.
        only = layer_of(runs[0])

        def layer(x: jax.Array, of_layer: tuple[Params, Site | None]) -> tuple[jax.Array, Out]:
            return only(x, *of_layer)

        return jax.lax.scan(_recomputed(layer, remat), x, (stacked, sites_of(runs[0])))
    values, gradients, kept = jax.lax.stop_gradient(stacked), stacked, []
    for run in runs:

        def one_layer(
            carry: tuple[jax.Array, Params],
            place: tuple[jax.Array, Site | None],
            layer: Layer[Out] = layer_of(run),  # noqa: B008
        ) -> tuple[tuple[jax.Array, Params], Out]:
            (x, gradients), (number, site) = carry, place
            read = {name: _read(values[name], number, one) for name, one in gradients.items()}
            x, out = layer(x, {name: one for name, (one, _) in read.items()}, site)
            return (x, {name: one for name, (_, one) in read.items()}), out

        places = (jnp.asarray(run), sites_of(run))
        (x, gradients), of_run = jax.lax.scan(_recomputed(one_layer, remat), (x, gradients), places)
        kept.append(of_run)
    return x, jax.tree.map(lambda *of_runs: jnp.concatenate(of_runs), *kept)


def _read(stacked: AtRest, number: jax.Array, gradient: AtRest) -> tuple[AtRest, AtRest]:
    if isinstance(stacked, WithGradient) and isinstance(gradient, WithGradient):
        values = jax.lax.dynamic_index_in_dim(stacked.values, number, keepdims=False)
        of_layer, rest = _layer_of(stacked.gradient, number, gradient.gradient)
        return WithGradient(values, of_layer), WithGradient(gradient.values, rest)
    assert not isinstance(stacked, WithGradient)
    return _layer_of(stacked, number, gradient)


@jax.custom_vjp
def _layer_of(stacked: jax.Array, number: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One layer of a stack. ``gradient``: only its cotangent is of interest, that of the stack. Its values are not read."""
    return jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False), gradient


def _backward(number: jax.Array, cotangents: tuple[jax.Array, jax.Array]) -> tuple[None, None, jax.Array]:
    of_layer, of_stack = cotangents
    return None, None, jax.lax.dynamic_update_index_in_dim(of_stack, of_layer, number, 0)


_layer_of.defvjp(lambda stacked, number, gradient: (_layer_of(stacked, number, gradient), number), _backward)


def _recomputed(layer, remat: str):
    if remat == "none":
        return layer
    policies = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(PRODUCT),
        ),
    }
    return jax.checkpoint(layer, policy=policies[remat], prevent_cse=False)
