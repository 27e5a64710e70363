"""The two ends of a model: from a batch to the first layer, and from the last layer to the logits and the loss.

B rows, L tokens, M embed, V vocabulary. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from shardwright.core.program.primitives import Cap, Product, Scale
from shardwright.core.program.program import Value
from shardwright.core.program.walk import LossGroup, Walk, weights_in
from shardwright.engine_jax.io.layer_io import InUse, Links, Params, Site, gradient_of, with_gradient
from shardwright.engine_jax.io.scopes import of_component
from shardwright.engine_jax.layers.chunked_loss import chunked_cross_entropy
from shardwright.engine_jax.layers.embedding import Scoring, scores
from shardwright.engine_jax.layers.loss import summed_cross_entropy
from shardwright.engine_jax.layers.order import weight_first
from shardwright.engine_jax.model.interpreter import Interpreter

Batch = Mapping[str, jax.Array]


class Embedded(NamedTuple):
    """The input of the first layer, and the weights of both ends that are in use already."""

    x_BLM: jax.Array
    tied: InUse


def embedded(batch: Batch, params: Params, walk: Walk, links: Links, *, twice: bool = True) -> Embedded:
    """``twice``: whether a tied weight may be taken into use once for both ends."""
    weights, tied = dict[str, Any](), dict[str, Any]()
    for name in weights_in(walk.before):
        if twice and name in walk.tied and links.tied_once:
            weights[name], tied[name] = links.use_twice(name, params[name])
        else:
            weights[name] = links.use(name, params[name])
    values, _ = _interpreter(walk, weights, links).run(walk.before, _fields(batch, walk))
    return Embedded(values[walk.input], tied)


def logits_of(x_BLM: jax.Array, params: Params, tied: InUse, batch: Batch, walk: Walk, links: Links) -> jax.Array:
    """The logits, BLV, of the last layer's output. ``tied``: the weights of both ends that are in use already."""
    values, group = _before_the_loss(x_BLM, params, batch, walk, links, only_scores=True)
    (use,) = group.product.weights
    with of_component(group.output.component):
        weight = tied[use.name] if use.name in tied else _in_use(use.name, params[use.name], group, walk, links)
        return scores(values[group.input], weight, _scoring(group, links))


def loss_of(x_BLM: jax.Array, params: Params, tied: InUse, batch: Batch, walk: Walk, links: Links) -> jax.Array:
    """The loss summed over a device's own valid tokens, of the last layer's output. ``tied``: the weights of both ends that are in use already."""
    values, group = _before_the_loss(x_BLM, params, batch, walk, links)
    (use,), scoring = group.product.weights, _scoring(group, links)
    x_BLM, (targets_BL, valid_BL) = values[group.input], (values[value] for value in group.loss.inputs[1:])
    with of_component(group.output.component):
        if use.name in tied:
            x_BLM, weight = weight_first(x_BLM, tied[use.name])
        else:
            at_rest = params[use.name]
            if use.name not in walk.tied:
                x_BLM, gradient = weight_first(x_BLM, gradient_of(at_rest))
                at_rest = with_gradient(at_rest, gradient)
            weight = _in_use(use.name, at_rest, group, walk, links)
        if links.loss_chunks > 1:
            return chunked_cross_entropy(x_BLM, weight, targets_BL, valid_BL, scoring, links.loss_chunks)
        return summed_cross_entropy(scores(x_BLM, weight, scoring), targets_BL, valid_BL, scoring.axes)


def at_the_end(links: Links, site: Site | None) -> Links:
    """The links of the products outside of layers."""
    if site is None:
        return links
    return replace(links, low={name: replace(low, site=site) for name, low in links.low.items()})


def _before_the_loss(
    x_BLM: jax.Array, params: Params, batch: Batch, walk: Walk, links: Links, *, only_scores: bool = False
) -> tuple[Mapping[Value, Any], LossGroup]:
    """``only_scores``: without what the loss alone reads of the batch."""
    *operations, group = walk.after
    assert isinstance(group, LossGroup)
    if only_scores:
        operations = [operation for operation in operations if operation.output not in group.loss.inputs[1:]]
    weights = {name: links.use(name, params[name]) for name in weights_in(operations)}
    values, _ = _interpreter(walk, weights, links).run(operations, {**_fields(batch, walk), walk.output: x_BLM})
    return values, group


def _in_use(name: str, at_rest: Any, group: LossGroup, walk: Walk, links: Links) -> Any:
    """The weight of the scores. One of both ends is resharded a second time for it."""
    if name in walk.tied:
        return links.use(name, at_rest, group.product.output.component)
    low = links.low.get(name)
    return links.use(name, at_rest, factor=None if low is None else low.factor)


def _scoring(group: LossGroup, links: Links) -> Scoring:
    assert isinstance(group.product.does, Product)
    return Scoring(
        dims=group.product.does.dims.einsum,
        dtype=group.product.output.dtype,
        low=links.low.get(group.product.weights[0].name),
        on_each=tuple(step.does for step in group.between if isinstance(step.does, Cap | Scale)),
        axes=links.vocab.get(group.output.component, ()),
        entries=links.entries,
    )


def _interpreter(walk: Walk, weights: InUse, links: Links) -> Interpreter:
    return Interpreter(walk=walk, weights=weights, prepared=(), links=links)


def _fields(batch: Batch, walk: Walk) -> dict[Value, jax.Array]:
    return {value: batch[name] for name, value in walk.fields.items() if name in batch}
