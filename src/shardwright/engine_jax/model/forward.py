"""The forward pass of any model, from its table: the embedding, scans over each stack of layers, and the logits.

B rows, L tokens, M embed, V vocabulary, N layers of a stack. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax

from shardwright.core.model.table import ModelTable
from shardwright.core.quantization.products import layer_runs
from shardwright.engine_jax.attention.attention import attention, mask_of
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.experts.moe import MoeCounts, experts_layer, valid_tokens
from shardwright.engine_jax.io.layer_io import Links, Params
from shardwright.engine_jax.io.scopes import of_component
from shardwright.engine_jax.layers.embedding import embed, logits
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
    params: Params, batch: Mapping[str, jax.Array], table: ModelTable, links: Links, *, remat: str = "full"
) -> Forward:
    """Logits of every token.

    ``params``: arrays by the names of the table, weights of a stack with its layers along dim 0. ``batch``:
    ``tokens``, ``positions`` within a document and ``segments`` (0 is padding), all int32 BL. ``links``: see
    ``layer_io``. ``remat``: what the backward pass recomputes, ``full``, ``dots`` (all but products with weights)
    or ``none``.
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
        low = {names[name]: links.low[name] for name in names if name in links.low}
        own = replace(links, low={name: one for name, one in low.items() if one.num_layers > run.start})

        def one_layer(x_BLM: jax.Array, layer: Params) -> tuple[jax.Array, MoeCounts | None]:
            weights = {names[name]: own.use(name, array) for name, array in layer.items()}
            return _layer(x_BLM, valid_BL, weights, stack, architecture, rotation, mask, own)

        return one_layer

    for stack in architecture.stacks:
        names = table.names_in(stack.name)
        layers = {name: params[name] for name in names}
        runs = layer_runs(stack.num, (links.low[name].num_layers for name in names if name in links.low))
        x_BLM, of_stack = scanned(partial(layer_of, stack, names), x_BLM, layers, runs, remat)
        if of_stack is not None:
            counts[stack.name] = of_stack
    final_norm = links.use("residual.final_norm", params["residual.final_norm"])
    with of_component("residual"):
        x_BLM = rms_norm(x_BLM, final_norm, architecture.norm_eps)
    with of_component("logits"):
        return Forward(logits(x_BLM, params, tied_VM, links), counts)


def _layer(
    x_BLM: jax.Array,
    valid_BL: jax.Array | None,
    weights: Params,
    stack: Stack,
    architecture: Architecture,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> tuple[jax.Array, MoeCounts | None]:
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
