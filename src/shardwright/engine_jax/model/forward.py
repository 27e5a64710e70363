"""The forward pass of any model, from its program: the embedding, scans over each stack of layers, and the logits.

B rows, L tokens, M embed, V vocabulary, N layers of a stack. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.model.table import ModelTable
from shardwright.core.policies.policy import INPUT
from shardwright.core.policies.runs import Run, runs_of
from shardwright.core.program.program import LayerStack
from shardwright.core.program.walk import Walk
from shardwright.core.quantization.products import layer_runs
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.io.layer_io import InUse, Links, LowPrecision, Params, Site
from shardwright.engine_jax.io.recomputation import recomputed
from shardwright.engine_jax.model.ends import at_the_end, embedded, logits_of
from shardwright.engine_jax.model.interpreter import Interpreter
from shardwright.engine_jax.model.prepared import prepare
from shardwright.engine_jax.model.scan import Layer, scanned
from shardwright.models.layers.decoder import walk_of


class Forward(NamedTuple):
    """A device's own logits, and its ``counts`` by stack with experts, with the layers along the leading dim."""

    logits_BLV: jax.Array
    counts: Mapping[str, MoeCounts]


class ThroughLayers(NamedTuple):
    """The output of the last layer, the weights of both ends that are in use already, and ``counts`` as in ``Forward``."""

    x_BLM: jax.Array
    tied: InUse
    counts: Mapping[str, MoeCounts]


def forward(
    params: Params,
    batch: Mapping[str, jax.Array],
    table: ModelTable,
    links: Links,
    *,
    runs: Sequence[Run] | None = None,
    site: Site | None = None,
) -> Forward:
    """Logits of every token, all at one time. Arguments: see ``through_layers``."""
    last = through_layers(params, batch, table, links, runs=runs, site=site)
    walk = walk_of(table.architecture)
    return Forward(logits_of(last.x_BLM, params, last.tied, batch, walk, at_the_end(links, site)), last.counts)


def through_layers(
    params: Params,
    batch: Mapping[str, jax.Array],
    table: ModelTable,
    links: Links,
    *,
    runs: Sequence[Run] | None = None,
    site: Site | None = None,
) -> ThroughLayers:
    """The embedding and all layers.

    ``params``: arrays by the names of the table, weights of a stack with its layers along dim 0. ``batch``:
    ``tokens``, ``positions`` within a document and ``segments`` (0 is padding), all int32 BL. ``links``: see
    ``layer_io``. ``runs``: what layers keep for the backward pass; None: their inputs alone. ``site``: of the step and the microbatch, with the factors of all layers, which are stacked; None: no product is quantized.
    """
    walk = walk_of(table.architecture)
    prepared = prepare(batch, walk, links)
    x_BLM, tied = embedded(batch, params, walk, links)
    counts: dict[str, MoeCounts] = {}

    def layer_of(stack: LayerStack, names: Mapping[str, str], run: range) -> Layer[MoeCounts | None]:
        low = _low_of(links, names, run)

        def one_layer(x_BLM: jax.Array, layer: Params, site: Site | None) -> tuple[jax.Array, MoeCounts | None]:
            x_BLM = checkpoint_name(x_BLM, INPUT)
            own, weights = in_use(layer, names, low, site, links)
            return computed_layer(x_BLM, stack, prepared, weights, walk, own)

        return one_layer

    def sites_of(first: int, names: Mapping[str, str], run: range) -> Site | None:
        low = _low_of(links, names, run)
        return None if site is None or not low else _of_layers(site, low, first, run)

    def again_of(runs: Sequence[Run], layers: range) -> Callable[[Any], Any]:
        run = next(run for run in runs if layers.start in run.layers)
        return partial(recomputed, run=run, num_layers=len(layers))

    kept = runs_of(table, "full") if runs is None else runs
    for stack in walk.program.stacks:
        names = table.names_in(stack.name)
        layers = {name: params[name] for name in names}
        own = [run for run in kept if run.stack == stack.name]
        ends = [low.num_layers for low in (links.low.get(name) for name in names) if low is not None]
        alike = layer_runs(stack.num, (*ends, *(run.layers.stop for run in own)))
        x_BLM, of_stack = scanned(
            partial(layer_of, stack, names),
            x_BLM,
            layers,
            partial(sites_of, stack.first_layer, names),
            alike,
            partial(again_of, own),
        )
        if of_stack is not None:
            counts[stack.name] = of_stack
    return ThroughLayers(x_BLM, tied, counts)


def in_use(
    at_rest: Params, names: Mapping[str, str], low: Mapping[str, LowPrecision], site: Site | None, links: Links
) -> tuple[Links, InUse]:
    """The weights of a layer in use, by their names in it, and the links of its products. ``low``: those that are quantized, at ``site``."""
    at_site = {names[name]: one if site is None else replace(one, site=site) for name, one in low.items()}
    own = replace(links, low=at_site)
    found: dict[str, Any] = {}
    for name, one in at_rest.items():
        of_it = own.low.get(names[name])
        found[names[name]] = own.use(name, one, high=of_it is None, factor=None if of_it is None else of_it.factor)
    return own, found


def _low_of(links: Links, names: Mapping[str, str], run: range) -> Mapping[str, LowPrecision]:
    """The weights that are quantized in a run of layers of a stack, by their names in the table."""
    return {name: links.low[name] for name in names if name in links.low and links.low[name].num_layers > run.start}


def _of_layers(site: Site, low: Mapping[str, LowPrecision], first: int, run: range) -> Site:
    """The sites of a run of layers of a stack, stacked. ``first``: the number of the stack's first layer."""
    names = {name for one in low.values() for name in one.delayed.values()}
    alike = jax.tree.map(lambda number: jnp.full(len(run), number, jnp.int32), site._replace(layer=0, factors={}))
    return alike._replace(
        layer=jnp.arange(first + run.start, first + run.stop, dtype=jnp.int32),
        factors={name: site.factors[name][run.start : run.stop] for name in sorted(names)},
    )


def computed_layer(
    x_BLM: jax.Array, stack: LayerStack, prepared: Sequence[Any], weights: InUse, walk: Walk, links: Links
) -> tuple[jax.Array, MoeCounts | None]:
    """One layer of a stack. ``prepared``: of the batch; ``weights``: in use, by their names in the layer."""
    interpreter = Interpreter(walk=walk, weights=weights, prepared=prepared, links=links)
    values, counts = interpreter.run(walk.layers[stack.name], {stack.input: x_BLM})
    return values[stack.output], counts
