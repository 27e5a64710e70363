"""A layer of experts: token-expert assignments sorted by expert, dispatched to their experts, and combined by token.

B rows, L tokens, M embed, E experts, K experts of a token, as the router has them; B rows of T tokens as they are dispatched;
S tokens of one tile; N assignments that are sent; R rows of the buffer of received rows. I tiles
of a device, J tiles of all; X tokens. All others are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.quantization.dispatch import SentRows
from shardwright.engine_jax.experts.exchange import (
    Exchange,
    from_experts,
    gathered,
    reduce_scattered,
    routes_of,
    to_experts,
    with_quantized_cotangent,
)
from shardwright.engine_jax.experts.grouped import grouped_swiglu
from shardwright.engine_jax.experts.grouped_blocks import Matrices
from shardwright.engine_jax.experts.grouped_low import quantized_swiglu
from shardwright.engine_jax.experts.nodes import Tokens, by_way_of_nodes
from shardwright.engine_jax.experts.routing import route
from shardwright.engine_jax.experts.rows import (
    combine_rows,
    count_by_expert,
    dispatch_rows,
    one_hot,
    sort_by_expert,
    within,
)
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.layer_io import ExpertLinks, InUse, Links, LowPrecision, index_of, size_of
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.models.layers.ends import NO_DOCUMENT
from shardwright.models.parts.architecture import Experts


class MoeCounts(NamedTuple):
    """Counts of the token-expert assignments of a device's tokens, int32.

    ``by_expert``: those of each expert, dropped ones included, E. ``dropped``: those beyond an expert's capacity.
    ``overflow``: those beyond the capacity of a device's buffer. Every token is counted by the one device that dispatches it,
    so that the sums over the axes that shard ``router.grouped`` are those of the global batch.
    """

    by_expert: jax.Array
    dropped: jax.Array
    overflow: jax.Array


def valid_tokens(segments_BL: jax.Array, links: Links) -> jax.Array:
    """Which tokens are not padding, BL, sharded as the router's input. ``segments_BL``: sharded as the input."""
    return links.move("input.segments", "router.valid", segments_BL) != NO_DOCUMENT


def experts_layer(
    x_BLM: jax.Array, valid_BL: jax.Array, weights: InUse, experts: Experts, links: Links
) -> tuple[jax.Array, MoeCounts]:
    """What the routed experts add to the residual stream, BLM. ``x_BLM``: the normalized stream; ``valid_BL``: ``valid_tokens``.

    If the layout sets a buffer smaller than the most rows that a device can receive, assignments beyond its capacity
    contribute nothing and are counted.
    """
    among = links.experts
    assert among is not None
    x_BLM = links.move("residual.stream", "router.input", x_BLM)
    with of_component("router"):
        routing = route(x_BLM, weights["router.kernel"], weights.get("router.bias"), experts)
    valid_experts_BLK = jnp.where(valid_BL[..., None], routing.experts_BLK, experts.num)

    x_BTM = links.move("router.input", "router.grouped", x_BLM)
    experts_BTK = links.move("router.experts", "router.grouped_experts", valid_experts_BLK)
    weights_BTK = links.move("router.chosen", "router.weights", routing.weights_BLK)
    with of_component("router"):
        kept_BTK = within_capacity(experts_BTK, experts, among)
    dropped = jnp.sum((experts_BTK < experts.num) & ~kept_BTK, dtype=jnp.int32)
    matrices = Matrices(weights["moe.gate"], weights["moe.up"], weights["moe.down"])
    kept_experts_BTK = jnp.where(kept_BTK, experts_BTK, experts.num)
    with of_component("moe"):
        out_BTM, overflow = _expert_outputs(x_BTM, kept_experts_BTK, weights_BTK, matrices, experts, among, links.low)
    out_BLM = links.move("router.combined", "router.output", out_BTM)
    counts = MoeCounts(count_by_expert(experts_BTK, experts.num), dropped, overflow)
    return links.move("router.output", "residual.stream", out_BLM), counts


def within_capacity(experts_BTK: jax.Array, experts: Experts, links: ExpertLinks) -> jax.Array:
    """Which assignments are within their experts' capacity, BTK. ``experts_BTK`` is ``experts.num`` for padding tokens.

    An expert keeps the first assignments of a row, up to its capacity. They are counted over the full row in the order of the
    text. So neither the devices that share a row nor the order of its chunks changes which assignments are dropped.
    """
    B, T, _ = experts_BTK.shape
    valid_BTK, devices, capacity = experts_BTK < experts.num, size_of(links.row), links.traffic.capacity
    if capacity is None:
        return valid_BTK
    own = len(links.tiles) // devices
    of_token_BTE = jnp.sum(one_hot(experts_BTK, experts.num), axis=2, dtype=jnp.int32)
    of_token_BISE = of_token_BTE.reshape(B, own, T // own, experts.num)
    of_tile_BIE = jnp.sum(of_token_BISE, axis=2)
    of_all_BJE = jax.lax.all_gather(of_tile_BIE, links.row, axis=1, tiled=True) if links.row else of_tile_BIE
    tile_J = jnp.asarray(links.tiles, jnp.int32)
    tile_I = jax.lax.dynamic_slice_in_dim(tile_J, index_of(links.row) * own, own)
    earlier_IJ = tile_J[None] < tile_I[:, None]
    before_BIE = jnp.sum(jnp.where(earlier_IJ[None, :, :, None], of_all_BJE[:, None], 0), axis=2, dtype=jnp.int32)
    place_BISE = jnp.cumsum(of_token_BISE, axis=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = place_BISE.reshape(B, T, experts.num) >= capacity
    return valid_BTK & ~jnp.any(one_hot(experts_BTK, experts.num) & full_BTE[:, :, None], axis=-1)


def _expert_outputs(
    x_BTM: jax.Array,
    kept_experts_BTK: jax.Array,
    weights_BTK: jax.Array,
    matrices: Matrices,
    experts: Experts,
    links: ExpertLinks,
    low: Mapping[str, LowPrecision],
) -> tuple[jax.Array, jax.Array]:
    """The outputs of the experts, weighted and summed by token, and the number of assignments that overflow a buffer.

    In a ring every device gathers all tokens of the group and processes the assignments of its own experts only; the partial
    sums of a token are reduce-scattered to its device. Otherwise an all-to-all sends the rows to their experts and back, in the nodes that
    tokens were sent to before if it takes two hops.
    """
    B, T, K = kept_experts_BTK.shape
    M, own, traffic = x_BTM.shape[-1], matrices.gate_EMF.shape[0], links.traffic
    assert (B, T, K, own) == (traffic.rows, traffic.tokens, traffic.top_k, traffic.experts), (
        kept_experts_BTK.shape,
        traffic,
    )
    tokens = Tokens(x_BTM.reshape(B * T, M), kept_experts_BTK.reshape(B * T, K), weights_BTK.reshape(B * T, K))
    sent = links.sent.in_layer(low)

    def outputs(tokens: Tokens, experts: int) -> tuple[jax.Array, jax.Array]:
        out_XM, overflow = _outputs_of(tokens, experts, matrices, links, sent, low)
        return out_XM.astype(kept_in("combined", x_BTM.dtype)), overflow

    if len(links.hops) > 1:
        out_XM, overflow = by_way_of_nodes(tokens, experts.num, links.hops[0], sent.tokens, outputs)
    else:
        out_XM, overflow = outputs(tokens, experts.num)
    with of_tensor("router.combined"):
        return jnp.reshape(reduce_scattered(out_XM, links.ring), (B, T, M)), overflow


def _outputs_of(
    tokens: Tokens,
    experts: int,
    matrices: Matrices,
    links: ExpertLinks,
    sent: SentRows,
    low: Mapping[str, LowPrecision],
) -> tuple[jax.Array, jax.Array]:
    """The sums of tokens' outputs by the ``experts`` of a ring, or of the devices of the last hop; and the overflow."""
    own, hop, buffer_rows = matrices.gate_EMF.shape[0], links.hops[-1], links.buffer_rows
    alone = links.ring is not None or not links.axes
    with of_tensor("router.grouped"):
        x_XM = gathered(tokens.x_XM, links.ring, sent.tokens if alone else None)
    with of_tensor("router.weights"):
        weights_XK = gathered(tokens.weights_XK, links.ring)
    # The experts that assignments are sorted by: this device's own in a ring, otherwise all.
    group, first = (own, index_of(links.axes) * own) if links.ring else (experts, 0)
    with of_tensor("router.grouped_experts"):
        own_experts_X = jnp.subtract(gathered(tokens.experts_XK.reshape(-1), links.ring), first)
    expert_N = jnp.where((own_experts_X >= 0) & (own_experts_X < group), own_experts_X, group)
    order = sort_by_expert(expert_N, group)
    exchange = Exchange(
        axes=() if links.ring else hop.axes,
        rows=expert_N.shape[0] if links.ring else hop.rows,
        buffer_rows=buffer_rows,
        chunk=hop.chunk,
    )
    sizes_E, beyond = within(order.sizes_E, exchange.rows) if len(links.hops) > 1 else (order.sizes_E, 0)
    routes = routes_of(sizes_E, exchange)

    def swiglu(rows_RM: Any) -> jax.Array:
        if any(f"moe.{name}" in low for name in ("gate", "up", "down")):
            return quantized_swiglu(rows_RM, matrices, routes.sizes_E, links.products.rows, low)
        return grouped_swiglu(rows_RM, matrices, routes.sizes_E, links.products)

    if exchange.axes:
        with of_tensor("router.grouped"):
            rows_NM = checkpoint_name(dispatch_rows(x_XM, order, exchange.rows, exchange.rows), "router.dispatched")
            rows_RM = checkpoint_name(to_experts(rows_NM, routes, exchange, sent.tokens), "moe.dispatched")
        y_RM = checkpoint_name(swiglu(rows_RM), "moe.output")
        with of_tensor("router.combined"):
            y_NM = checkpoint_name(from_experts(y_RM, routes, exchange, sent.cotangents), "router.returned")
        out_XM = combine_rows(y_NM, weights_XK, order, exchange.rows)
    else:
        num_rows = jnp.sum(routes.sizes_E)
        rows_RM = checkpoint_name(dispatch_rows(x_XM, order, num_rows, buffer_rows), "moe.dispatched")
        y_RM = checkpoint_name(with_quantized_cotangent(swiglu(rows_RM), sent.cotangents), "moe.output")
        out_XM = combine_rows(y_RM, weights_XK, order, num_rows)
    return out_XM, routes.overflow + beyond
