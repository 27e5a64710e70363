"""Weights of a stage that stay gathered through a step (``keep_gathered``): they are gathered before the first tick, row after row, and
their gradients are summed in use, and reduce-scattered behind the last tick. Rows of padding are gathered too, because all devices have
as many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from shardwright.engine_jax.io.layer_io import AtRest, Links, Params
from shardwright.engine_jax.io.scopes import of_phase


def kept_gathered(weights: Params, links: Links) -> tuple[Params, Links]:
    """The weights, with those that stay gathered in use; and links that leave these as they are."""
    kept = [name for name in weights if name in links.kept]
    if not kept:
        return weights, links
    with of_phase("forward"):
        whole = {name: jax.lax.map(lambda one, name=name: links.use(name, one), weights[name]) for name in kept}

    def use(
        name: str,
        weight: AtRest,
        component: str | None = None,
        *,
        high: bool = False,
        factor: jax.Array | None = None,
    ) -> Any:
        return weight if name in whole else links.use(name, weight, component, high=high, factor=factor)

    return {**weights, **whole}, replace(links, use=use)


def scattered_once(gradients: Params, weights: Params, links: Links) -> Params:
    """The gradients of weights at rest. ``gradients``: the sums of a step, of weights that stay gathered in use."""

    def scattered(name: str, total: jax.Array) -> jax.Array:
        dtype = weights[name].dtype
        with of_phase("backward"):
            return jax.lax.map(lambda one: links.scatter(name, one, dtype), total)

    return {name: scattered(name, one) if name in links.kept else one for name, one in gradients.items()}
