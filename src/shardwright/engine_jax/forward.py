"""The forward pass of any model of ours, from its table: ends, and a scan over each stack of layers.

B rows, L tokens, M embed, V vocabulary, N layers of a stack, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.table import ModelTable
from shardwright.engine_jax.attention import Sight, attention
from shardwright.engine_jax.embedding import embed, logits
from shardwright.engine_jax.layer_io import WHOLE, Cuts, Params, Place, Use, cast_for_use, stay
from shardwright.engine_jax.mlp import feed_forward
from shardwright.engine_jax.moe import experts_layer
from shardwright.engine_jax.norm import rms_norm
from shardwright.engine_jax.rotary import Angles, angles
from shardwright.models.parts.architecture import Architecture, Stack

PADDING = 0
"""The segment of tokens that belong to no document: no expert sees them."""


class Forward(NamedTuple):
    """``logits_BLV`` in float32; ``counts_NE`` by stack, the tokens that chose each expert of each layer (int32)."""

    logits_BLV: jax.Array
    counts_NE: Mapping[str, jax.Array]


class Rows(NamedTuple):
    """What every layer needs to know of the tokens."""

    turned_by: Angles
    sight: Sight
    valid_BL: jax.Array


def forward(
    params: Params,
    batch: Mapping[str, jax.Array],
    table: ModelTable,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    place: Place = stay,
    use: Use | None = None,
    remat: str = "full",
    cuts: Cuts = WHOLE,
) -> Forward:
    """Logits of every token.

    ``params``: arrays by the names of the table, weights of a stack with its layers along dim 0. ``batch``: ``tokens``,
    and, where rows hold several documents, ``positions`` within a document and ``segments`` (0 is padding),
    all int32 BL. ``place`` and ``use``: see ``layer_io``. ``remat``: what the backward pass recomputes,
    ``full``, ``dots`` (all but matrix products of weights) or ``none``.
    """
    architecture: Architecture = table.architecture
    use = use or cast_for_use(table, jnp.dtype(dtype))
    rows = _rows(architecture, batch, place)
    x_BLM = embed(batch["tokens"], params, use, place, cuts.vocab)
    counts: dict[str, jax.Array] = {}
    for stack in architecture.stacks:
        prefix = f"{stack.name}."
        layers = {name: array for name, array in params.items() if name.startswith(prefix)}

        def one_layer(x_BLM: jax.Array, layer: Params, stack: Stack = stack) -> tuple[jax.Array, jax.Array | None]:
            weights = {name.removeprefix(f"{stack.name}."): use(name, array) for name, array in layer.items()}
            return _layer(x_BLM, weights, stack, architecture, rows, cuts, place)

        x_BLM, counts_NE = jax.lax.scan(_recomputed(one_layer, remat), x_BLM, layers)
        if counts_NE is not None:
            counts[stack.name] = counts_NE
    final_norm = use("residual.final_norm", params["residual.final_norm"])
    x_BLM = rms_norm(x_BLM, final_norm, architecture.norm_eps)
    return Forward(logits(x_BLM, params, use, place), counts)


def _layer(
    x_BLM: jax.Array,
    weights: Params,
    stack: Stack,
    architecture: Architecture,
    rows: Rows,
    cuts: Cuts,
    place: Place,
) -> tuple[jax.Array, jax.Array | None]:
    eps = architecture.norm_eps
    normed_BLM = rms_norm(x_BLM, weights["residual.attention_norm"], eps)
    added_BLM = attention(normed_BLM, weights, architecture, rows.turned_by, rows.sight, place, cuts.queries)
    x_BLM = x_BLM + place("residual.stream", added_BLM)
    normed_BLM = rms_norm(x_BLM, weights["residual.feed_forward_norm"], eps)
    if not stack.experts:
        added_BLM = feed_forward(normed_BLM, weights, "mlp", place)
        return place("residual.stream", x_BLM + place("residual.stream", added_BLM)), None
    assert architecture.experts is not None
    added_BLM, counts_E = experts_layer(normed_BLM, rows.valid_BL, weights, architecture.experts, cuts.groups, place)
    added_BLM = place("residual.stream", added_BLM)
    if architecture.experts.shared_width:
        added_BLM = added_BLM + place("residual.stream", feed_forward(normed_BLM, weights, "shared", place))
    return place("residual.stream", x_BLM + added_BLM), counts_E


def _rows(architecture: Architecture, batch: Mapping[str, jax.Array], place: Place) -> Rows:
    tokens_BL = batch["tokens"]
    positions_BL = batch.get("positions")
    if positions_BL is None:
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape)
    segments_BL = batch.get("segments")
    if segments_BL is None:
        segments_BL = jnp.ones_like(tokens_BL)
    positions_BL = place("input.positions", positions_BL)
    segments_BL = place("input.segments", segments_BL)
    sight = Sight(
        positions_BL=positions_BL,
        segments_BL=segments_BL,
        kv_positions_BS=place("attention.kv_positions", positions_BL),
        kv_segments_BS=place("attention.kv_segments", segments_BL),
    )
    turned_by = angles(architecture.rope, architecture.attention.rotary_dim, positions_BL)
    return Rows(turned_by=turned_by, sight=sight, valid_BL=segments_BL != PADDING)


def _recomputed(layer, remat: str):
    if remat == "none":
        return layer
    policies = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    # The scan already keeps XLA from merging the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policies[remat], prevent_cse=False)
