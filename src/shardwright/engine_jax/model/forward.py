"""The forward pass of any model, from its table: the embedding, scans over each stack of layers, and the logits.

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
from shardwright.core.quantization.products import layer_runs
from shardwright.engine_jax.attention.attention import attention, mask_of
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.experts.moe import MoeCounts, experts_layer, valid_tokens
from shardwright.engine_jax.io.layer_io import (
    InUse,
    Links,
    LowPrecision,
    Params,
    Site,
    gradient_of,
    with_gradient,
)
from shardwright.engine_jax.io.recomputation import recomputed
from shardwright.engine_jax.io.scopes import of_component
from shardwright.engine_jax.layers import embedding
from shardwright.engine_jax.layers.chunked_loss import chunked_cross_entropy
from shardwright.engine_jax.layers.embedding import embed, projection
from shardwright.engine_jax.layers.loss import summed_cross_entropy
from shardwright.engine_jax.layers.mlp import feed_forward
from shardwright.engine_jax.layers.norm import rms_norm
from shardwright.engine_jax.layers.order import weight_first
from shardwright.engine_jax.layers.rotary import Angles
from shardwright.engine_jax.model.scan import Layer, scanned
from shardwright.models.layers.decoder import AFTER_ATTENTION
from shardwright.models.parts.architecture import Architecture, Stack


class Forward(NamedTuple):
    """A device's own logits, and its ``counts`` by stack with experts, with the layers along the leading dim."""

    logits_BLV: jax.Array
    counts: Mapping[str, MoeCounts]


class ThroughLayers(NamedTuple):
    """The output of the last layer, a tied embedding that is in use already, and ``counts`` as in ``Forward``."""

    x_BLM: jax.Array
    tied_VM: jax.Array | None
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
    return Forward(scores(last.x_BLM, params, last.tied_VM, table.architecture, at_the_end(links, site)), last.counts)


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
    architecture: Architecture = table.architecture
    rotation, mask = mask_of(batch["positions"], batch["segments"], architecture, links)
    tokens, tied_VM = params["embedding.tokens"], None
    if "logits.kernel" not in params and links.tied_once:
        table_VM, tied_VM = links.use_twice("embedding.tokens", tokens)
    else:
        table_VM = links.use("embedding.tokens", tokens)
    with of_component("embedding"):
        x_BLM = embed(batch["tokens"], table_VM, links)
    counts: dict[str, MoeCounts] = {}
    with_experts = any(stack.experts for stack in architecture.stacks)
    valid_BL = valid_tokens(batch["segments"], links) if with_experts else None

    def layer_of(stack: Stack, names: Mapping[str, str], run: range) -> Layer[MoeCounts | None]:
        low = _low_of(links, names, run)

        def one_layer(x_BLM: jax.Array, layer: Params, site: Site | None) -> tuple[jax.Array, MoeCounts | None]:
            x_BLM = checkpoint_name(x_BLM, INPUT)
            own, weights = in_use(layer, names, low, site, links)
            return computed_layer(x_BLM, valid_BL, weights, stack, architecture, rotation, mask, own)

        return one_layer

    def sites_of(first: int, names: Mapping[str, str], run: range) -> Site | None:
        low = _low_of(links, names, run)
        return None if site is None or not low else _of_layers(site, low, first, run)

    def again_of(runs: Sequence[Run], layers: range) -> Callable[[Any], Any]:
        run = next(run for run in runs if layers.start in run.layers)
        return partial(recomputed, run=run, num_layers=len(layers))

    first, kept = 0, runs_of(table, "full") if runs is None else runs
    for stack in architecture.stacks:
        names = table.names_in(stack.name)
        layers = {name: params[name] for name in names}
        own = [run for run in kept if run.stack == stack.name]
        ends = [low.num_layers for low in (links.low.get(name) for name in names) if low is not None]
        alike = layer_runs(stack.num, (*ends, *(run.layers.stop for run in own)))
        x_BLM, of_stack = scanned(
            partial(layer_of, stack, names),
            x_BLM,
            layers,
            partial(sites_of, first, names),
            alike,
            partial(again_of, own),
        )
        if of_stack is not None:
            counts[stack.name] = of_stack
        first += stack.num
    return ThroughLayers(x_BLM, tied_VM, counts)


def at_the_end(links: Links, site: Site | None) -> Links:
    """The links of the products outside of layers."""
    if site is None:
        return links
    return replace(links, low={name: replace(low, site=site) for name, low in links.low.items()})


def scores(
    x_BLM: jax.Array, params: Params, tied_VM: jax.Array | None, architecture: Architecture, links: Links
) -> jax.Array:
    """The logits, BLV, of the last layer's output. ``tied_VM``: a tied embedding that is in use already."""
    x_BLM = _logits_input(x_BLM, params, architecture, links)
    with of_component("logits"):
        return embedding.scores(x_BLM, projection(params, tied_VM, links), links)


def loss_of(
    x_BLM: jax.Array,
    params: Params,
    tied_VM: jax.Array | None,
    batch: Mapping[str, jax.Array],
    architecture: Architecture,
    links: Links,
) -> jax.Array:
    """The loss summed over a device's own valid tokens, of the last layer's output. ``batch``: with ``targets`` and ``valid``,
    sharded as the input."""
    x_BLM = _logits_input(x_BLM, params, architecture, links)
    targets_BL = links.move("input.targets", "logits.targets", batch["targets"])
    valid_BL = links.move("input.valid", "logits.valid", batch["valid"])
    with of_component("logits"):
        if "logits.kernel" in params:
            kernel = params["logits.kernel"]
            x_BLM, gradient = weight_first(x_BLM, gradient_of(kernel))
            params = {**params, "logits.kernel": with_gradient(kernel, gradient)}
        elif tied_VM is not None:
            x_BLM, tied_VM = weight_first(x_BLM, tied_VM)
        projected = projection(params, tied_VM, links)
        if links.loss_chunks > 1:
            return chunked_cross_entropy(x_BLM, projected, targets_BL, valid_BL, links)
        logits_BLV = embedding.scores(x_BLM, projected, links)
        return summed_cross_entropy(logits_BLV, targets_BL, valid_BL, links.vocab.get("logits", ()))


def _logits_input(x_BLM: jax.Array, params: Params, architecture: Architecture, links: Links) -> jax.Array:
    """The output of the last layer, normed and resharded for the logits."""
    final_norm = links.use("residual.final_norm", params["residual.final_norm"])
    with of_component("residual"):
        x_BLM = rms_norm(x_BLM, final_norm, architecture.norm_eps)
    with of_component("logits"):
        return links.move("residual.stream", "logits.input", x_BLM)


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
    x_BLM: jax.Array,
    valid_BL: jax.Array | None,
    weights: InUse,
    stack: Stack,
    architecture: Architecture,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> tuple[jax.Array, MoeCounts | None]:
    """One layer of a stack. ``weights``: in use, by their names in the layer. ``valid_BL``: of a model with experts."""
    eps = architecture.norm_eps
    with of_component("residual"):
        normed_BLM = rms_norm(x_BLM, weights["residual.attention_norm"], eps)
    with of_component("attention"):
        attended_BLM = attention(normed_BLM, weights, architecture, rotation, mask, links)
    with of_component("residual"):
        x_BLM = checkpoint_name(x_BLM + attended_BLM, AFTER_ATTENTION)
        normed_BLM = rms_norm(x_BLM, weights["residual.feed_forward_norm"], eps)
    if not stack.experts:
        with of_component("mlp"):
            return x_BLM + feed_forward(normed_BLM, weights, "mlp", links), None
    assert architecture.experts is not None
    assert valid_BL is not None
    added_BLM, counts = experts_layer(normed_BLM, valid_BL, weights, architecture.experts, links)
    if architecture.experts.shared_width:
        with of_component("mlp"):
            added_BLM = added_BLM + feed_forward(normed_BLM, weights, "shared", links)
    return x_BLM + added_BLM, counts
