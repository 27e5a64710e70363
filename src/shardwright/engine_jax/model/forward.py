"""The forward pass of any model, from its table: the embedding, scans over each stack of layers, and the logits.

B rows, L tokens, M embed, V vocabulary, N layers of a stack. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.model.table import ModelTable
from shardwright.core.quantization.products import layer_runs
from shardwright.engine_jax.attention.attention import attention, mask_of
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.experts.moe import MoeCounts, experts_layer, valid_tokens
from shardwright.engine_jax.io.layer_io import InUse, Links, LowPrecision, Params, Site
from shardwright.engine_jax.io.scopes import of_component
from shardwright.engine_jax.layers.embedding import embed, logits
from shardwright.engine_jax.layers.loss import summed_cross_entropy
from shardwright.engine_jax.layers.mlp import feed_forward
from shardwright.engine_jax.layers.norm import rms_norm
from shardwright.engine_jax.layers.rotary import Angles
from shardwright.engine_jax.model.scan import Layer, scanned
from shardwright.models.parts.architecture import Architecture, Stack


class Forward(NamedTuple):
    """A device's own logits, and its ``counts`` by stack with experts, with the layers along the leading dim."""

    logits_BLV: jax.Array
    counts: Mapping[str, MoeCounts]


def forward(
    params: Params,
    batch: Mapping[str, jax.Array],
    table: ModelTable,
    links: Links,
    *,
    remat: str = "full",
    site: Site | None = None,
) -> Forward:
    """Logits of every token.

    ``params``: arrays by the names of the table, weights of a stack with its layers along dim 0. ``batch``:
    ``tokens``, ``positions`` within a document and ``segments`` (0 is padding), all int32 BL. ``links``: see
    ``layer_io``. ``remat``: what the backward pass recomputes, ``full``, ``dots`` (all but products with weights)
    or ``none``. ``site``: of the step and the microbatch, with the factors of all layers, which are stacked; None: no product is quantized.
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
            at_site = {names[name]: one if site is None else replace(one, site=site) for name, one in low.items()}
            own = replace(links, low=at_site)
            weights = {
                names[name]: own.use(name, array, high=names[name] not in own.low) for name, array in layer.items()
            }
            return computed_layer(x_BLM, valid_BL, weights, stack, architecture, rotation, mask, own)

        return one_layer

    def sites_of(first: int, names: Mapping[str, str], run: range) -> Site | None:
        low = _low_of(links, names, run)
        return None if site is None or not low else _of_layers(site, low, first, run)

    first = 0
    for stack in architecture.stacks:
        names = table.names_in(stack.name)
        layers = {name: params[name] for name in names}
        runs = layer_runs(stack.num, (links.low[name].num_layers for name in names if name in links.low))
        x_BLM, of_stack = scanned(
            partial(layer_of, stack, names), x_BLM, layers, partial(sites_of, first, names), runs, remat
        )
        if of_stack is not None:
            counts[stack.name] = of_stack
        first += stack.num
    if site is not None:
        links = replace(links, low={name: replace(low, site=site) for name, low in links.low.items()})
    return Forward(scores(x_BLM, params, tied_VM, architecture, links), counts)


def scores(
    x_BLM: jax.Array, params: Params, tied_VM: jax.Array | None, architecture: Architecture, links: Links
) -> jax.Array:
    """The logits, BLV, of the last layer's output. ``tied_VM``: a tied embedding that is in use already."""
    final_norm = links.use("residual.final_norm", params["residual.final_norm"])
    with of_component("residual"):
        x_BLM = rms_norm(x_BLM, final_norm, architecture.norm_eps)
    with of_component("logits"):
        return logits(x_BLM, params, tied_VM, links)


def loss_of(logits_BLV: jax.Array, batch: Mapping[str, jax.Array], links: Links) -> jax.Array:
    """The loss summed over a device's own valid tokens. ``batch``: with ``targets`` and ``valid``, sharded as the input."""
    targets = links.move("input.targets", "logits.targets", batch["targets"])
    valid = links.move("input.valid", "logits.valid", batch["valid"])
    with of_component("logits"):
        return summed_cross_entropy(logits_BLV, targets, valid, links.vocab.get("logits", ()))


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
        x_BLM = x_BLM + attended_BLM
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
