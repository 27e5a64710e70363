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

from shardwright.core.program.walk import ExpertGroup
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
from shardwright.engine_jax.experts.rows import (
    combine_rows,
    count_by_expert,
    dispatch_rows,
    one_hot,
    sort_by_expert,
    within,
)
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.layer_io import ExpertLinks, LowPrecision, index_of, size_of
from shardwright.engine_jax.io.scopes import of_component, of_tensor


class MoeCounts(NamedTuple):
    """Counts of the token-expert assignments of a device's tokens, int32.

    ``by_expert``: those of each expert, dropped ones included, E. ``dropped``: those beyond an expert's capacity.
    ``overflow``: those beyond the capacity of a device's buffer. Every token is counted by the one device that dispatches it,
    so that the sums over the axes that shard ``router.grouped`` are those of the global batch.
    """

    by_expert: jax.Array
    dropped: jax.Array
    overflow: jax.Array


def through_experts(
    x_BTM: jax.Array,
    experts_BTK: jax.Array,
    weights_BTK: jax.Array,
    matrices: Matrices,
    group: ExpertGroup,
    links: ExpertLinks,
    low: Mapping[str, LowPrecision],
) -> tuple[jax.Array, MoeCounts]:
    """The sum of each token's experts, BTM, and what is counted. ``group``: what is done, under which names; ``low``: by the names of weights.

    If the layout sets a buffer smaller than the most rows that a device can receive, assignments beyond its capacity
    contribute nothing and are counted.
    """
    num = group.num_experts
    with of_component(group.output.component):
        kept_BTK = within_capacity(experts_BTK, num, links)
    dropped = jnp.sum((experts_BTK < num) & ~kept_BTK, dtype=jnp.int32)
    kept_experts_BTK = jnp.where(kept_BTK, experts_BTK, num)
    with of_component(group.down.output.component):
        out_BTM, overflow = _expert_outputs(x_BTM, kept_experts_BTK, weights_BTK, matrices, group, links, low)
    return out_BTM, MoeCounts(count_by_expert(experts_BTK, num), dropped, overflow)


def within_capacity(experts_BTK: jax.Array, num: int, links: ExpertLinks) -> jax.Array:
    """Which assignments are within their experts' capacity, BTK. ``experts_BTK`` is ``num``, of all experts, for padding tokens.

    An expert keeps the first assignments of a row, up to its capacity. They are counted over the full row in the order of the
    text. So neither the devices that share a row nor the order of its chunks changes which assignments are dropped.
    """
    B, T, _ = experts_BTK.shape
    valid_BTK, devices, capacity = experts_BTK < num, size_of(links.row), links.traffic.capacity
    if capacity is None:
        return valid_BTK
    own = len(links.tiles) // devices
    of_token_BTE = jnp.sum(one_hot(experts_BTK, num), axis=2, dtype=jnp.int32)
    of_token_BISE = of_token_BTE.reshape(B, own, T // own, num)
    of_tile_BIE = jnp.sum(of_token_BISE, axis=2)
    of_all_BJE = jax.lax.all_gather(of_tile_BIE, links.row, axis=1, tiled=True) if links.row else of_tile_BIE
    tile_J = jnp.asarray(links.tiles, jnp.int32)
    tile_I = jax.lax.dynamic_slice_in_dim(tile_J, index_of(links.row) * own, own)
    earlier_IJ = tile_J[None] < tile_I[:, None]
    before_BIE = jnp.sum(jnp.where(earlier_IJ[None, :, :, None], of_all_BJE[:, None], 0), axis=2, dtype=jnp.int32)
    place_BISE = jnp.cumsum(of_token_BISE, axis=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = place_BISE.reshape(B, T, num) >= capacity
    return valid_BTK & ~jnp.any(one_hot(experts_BTK, num) & full_BTE[:, :, None], axis=-1)


def _expert_outputs(
    x_BTM: jax.Array,
    kept_experts_BTK: jax.Array,
    weights_BTK: jax.Array,
    matrices: Matrices,
    group: ExpertGroup,
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
        out_XM, overflow = _outputs_of(tokens, experts, matrices, group, links, sent, low)
        return out_XM.astype(kept_in("combined", x_BTM.dtype)), overflow

    if len(links.hops) > 1:
        out_XM, overflow = by_way_of_nodes(tokens, group.num_experts, links.hops[0], sent.tokens, outputs, group)
    else:
        out_XM, overflow = outputs(tokens, group.num_experts)
    with of_tensor(group.output.name):
        return jnp.reshape(reduce_scattered(out_XM, links.ring), (B, T, M)), overflow


def _outputs_of(
    tokens: Tokens,
    experts: int,
    matrices: Matrices,
    group: ExpertGroup,
    links: ExpertLinks,
    sent: SentRows,
    low: Mapping[str, LowPrecision],
) -> tuple[jax.Array, jax.Array]:
    """The sums of tokens' outputs by the ``experts`` of a ring, or of the devices of the last hop; and the overflow."""
    own, hop, buffer_rows = matrices.gate_EMF.shape[0], links.hops[-1], links.buffer_rows
    alone = links.ring is not None or not links.axes
    with of_tensor(group.tokens.name):
        x_XM = gathered(tokens.x_XM, links.ring, sent.tokens if alone else None)
    with of_tensor(group.weights.name):
        weights_XK = gathered(tokens.weights_XK, links.ring)
    # The experts that assignments are sorted by: this device's own in a ring, otherwise all.
    num, first = (own, index_of(links.axes) * own) if links.ring else (experts, 0)
    with of_tensor(group.experts.name):
        own_experts_X = jnp.subtract(gathered(tokens.experts_XK.reshape(-1), links.ring), first)
    expert_N = jnp.where((own_experts_X >= 0) & (own_experts_X < num), own_experts_X, num)
    order = sort_by_expert(expert_N, num)
    exchange = Exchange(
        axes=() if links.ring else hop.axes,
        rows=expert_N.shape[0] if links.ring else hop.rows,
        buffer_rows=buffer_rows,
        chunk=hop.chunk,
    )
    sizes_E, beyond = within(order.sizes_E, exchange.rows) if len(links.hops) > 1 else (order.sizes_E, 0)
    routes = routes_of(sizes_E, exchange)
    rows, sent_rows, outputs = group.dispatch.output.name, group.sent.output.name, group.down.output.name
    hidden = (group.gate.output.name, group.up.output.name)

    def swiglu(rows_RM: Any) -> jax.Array:
        quantized = [low.get(product.weights[0].name) for product in group.products]
        if any(low is not None for low in quantized):
            return quantized_swiglu(rows_RM, matrices, routes.sizes_E, links.products.rows, quantized, hidden)
        return grouped_swiglu(rows_RM, matrices, routes.sizes_E, links.products, hidden)

    if exchange.axes:
        with of_tensor(group.tokens.name):
            rows_NM = checkpoint_name(dispatch_rows(x_XM, order, exchange.rows, exchange.rows), rows)
            rows_RM = checkpoint_name(to_experts(rows_NM, routes, exchange, sent.tokens), sent_rows)
        y_RM = checkpoint_name(swiglu(rows_RM), outputs)
        with of_tensor(group.output.name):
            y_NM = checkpoint_name(from_experts(y_RM, routes, exchange, sent.cotangents), group.returned.output.name)
        out_XM = combine_rows(y_NM, weights_XK, order, exchange.rows)
    else:
        num_rows = jnp.sum(routes.sizes_E)
        rows_RM = checkpoint_name(dispatch_rows(x_XM, order, num_rows, buffer_rows), sent_rows)
        y_RM = checkpoint_name(with_quantized_cotangent(swiglu(rows_RM), sent.cotangents), outputs)
        out_XM = combine_rows(y_RM, weights_XK, order, num_rows)
    return out_XM, routes.overflow + beyond
