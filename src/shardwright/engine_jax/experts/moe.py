"""A layer of experts: token-expert assignments sorted by expert, dispatched to their experts, and combined by token.

B rows, L tokens, M embed, E experts, K experts of a token, as the router has them; B rows of T tokens as they are dispatched;
S tokens of one tile; N = B * T * K assignments; R rows of the buffer of received rows. I tiles
of a device, J tiles of all; X any tokens. All others are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
from shardwright.engine_jax.experts.routing import route
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.layer_io import ExpertLinks, InUse, Links, LowPrecision, index_of, size_of
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.models.parts.architecture import Experts
from shardwright.models.parts.ends import NO_DOCUMENT


class MoeCounts(NamedTuple):
    """Counts of the token-expert assignments of a device's tokens, int32.

    ``by_expert``: those of each expert, dropped ones included, E. ``dropped``: those beyond an expert's capacity.
    ``overflow``: those beyond the capacity of a device's buffer. Every token is counted by the one device that dispatches it,
    so that the sums over the axes that shard ``router.grouped`` are those of the global batch.
    """

    by_expert: jax.Array
    dropped: jax.Array
    overflow: jax.Array


class SortedAssignments(NamedTuple):
    """Token-expert assignments sorted by expert. Those that no expert processes are last.

    An assignment is a token with one of its experts, numbered ``token * K + which``. ``assignment_N``: the assignment at each
    place; ``place_N``: the place of each assignment; ``sizes_E``: assignments of each expert.
    """

    assignment_N: jax.Array
    place_N: jax.Array
    sizes_E: jax.Array


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
    counts = MoeCounts(_count_by_expert(experts_BTK, experts.num), dropped, overflow)
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
    of_token_BTE = jnp.sum(_one_hot(experts_BTK, experts.num), axis=2, dtype=jnp.int32)
    of_token_BISE = of_token_BTE.reshape(B, own, T // own, experts.num)
    of_tile_BIE = jnp.sum(of_token_BISE, axis=2)
    of_all_BJE = jax.lax.all_gather(of_tile_BIE, links.row, axis=1, tiled=True) if links.row else of_tile_BIE
    tile_J = jnp.asarray(links.tiles, jnp.int32)
    tile_I = jax.lax.dynamic_slice_in_dim(tile_J, index_of(links.row) * own, own)
    earlier_IJ = tile_J[None] < tile_I[:, None]
    before_BIE = jnp.sum(jnp.where(earlier_IJ[None, :, :, None], of_all_BJE[:, None], 0), axis=2, dtype=jnp.int32)
    place_BISE = jnp.cumsum(of_token_BISE, axis=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = place_BISE.reshape(B, T, experts.num) >= capacity
    return valid_BTK & ~jnp.any(_one_hot(experts_BTK, experts.num) & full_BTE[:, :, None], axis=-1)


def sort_by_expert(expert_N: jax.Array, experts: int) -> SortedAssignments:
    """Assignments sorted by expert, earlier ones first within each. Numbers of ``experts`` and above are no expert."""
    number_N = jnp.arange(expert_N.shape[0], dtype=jnp.int32)
    _, assignment_N = jax.lax.sort((expert_N, number_N), num_keys=1, is_stable=True)
    _, place_N = jax.lax.sort((assignment_N, number_N), num_keys=1)
    return SortedAssignments(assignment_N, place_N, _count_by_expert(expert_N, experts))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch_rows(x_XM: jax.Array, order: SortedAssignments, num_rows: jax.Array | int, buffer_rows: int) -> jax.Array:
    """The tokens of the first ``buffer_rows`` assignments, sorted by expert, RM. Only the first ``num_rows`` have a cotangent."""
    del num_rows
    return _at(x_XM, _token_of(order, x_XM.shape[0], buffer_rows))


def _dispatch_rows_backward(
    buffer_rows: int, residuals: tuple[SortedAssignments, jax.Array | int, int], d_RM: jax.Array
) -> tuple[jax.Array, None, None]:
    # A token's cotangent is the sum over its assignments.
    order, num_rows, tokens = residuals
    del buffer_rows
    place_XK = order.place_N.reshape(tokens, -1)
    d_XM = _weighted_sum("cotangent", d_RM, place_XK, jnp.ones(place_XK.shape, d_RM.dtype), num_rows)
    return d_XM.astype(kept_in("cotangent", d_RM.dtype)), None, None


dispatch_rows.defvjp(
    lambda x_XM, order, num_rows, buffer_rows: (
        dispatch_rows(x_XM, order, num_rows, buffer_rows),
        (order, num_rows, x_XM.shape[0]),
    ),
    _dispatch_rows_backward,
)


@jax.custom_vjp
def combine_rows(
    y_RM: jax.Array, weights_XK: jax.Array, order: SortedAssignments, num_rows: jax.Array | int
) -> jax.Array:
    """Each token's weighted sum over its assignments, XM. ``y_RM``: sorted by expert; only its first ``num_rows`` count."""
    return _weighted_sum("combined", y_RM, order.place_N.reshape(weights_XK.shape), weights_XK, num_rows)


def _combine_rows_backward(residuals, d_XM: jax.Array):
    y_RM, weights_XK, order, num_rows = residuals
    buffer_rows, place_XK = y_RM.shape[0], order.place_N.reshape(weights_XK.shape)
    weight_R = jnp.where(
        jnp.arange(buffer_rows) < num_rows, _at(weights_XK.reshape(-1), order.assignment_N[:buffer_rows]), 0
    )
    # The sum is returned in the rows' dtype, so that rounding its cotangent to that dtype loses nothing.
    d_RM = _at(d_XM.astype(y_RM.dtype), _token_of(order, place_XK.shape[0], buffer_rows))
    wide = computed("cotangent", y_RM.dtype)
    d_y_RM = (d_RM.astype(wide) * weight_R[:, None]).astype(kept_in("cotangent", y_RM.dtype))

    def cotangent(place_X: jax.Array) -> jax.Array:
        return jnp.sum(_rows_at(y_RM, place_X, num_rows, wide) * d_XM, axis=1)

    return d_y_RM, jax.lax.map(cotangent, place_XK.T).T.astype(weights_XK.dtype), None, None


combine_rows.defvjp(lambda *given: (combine_rows(*given), given), _combine_rows_backward)


def _weighted_sum(
    what: str, rows_RM: jax.Array, place_XK: jax.Array, weights_XK: jax.Array, num_rows: jax.Array | int
) -> jax.Array:
    """Each token's weighted sum over its assignments, XM, in the dtype in which ``what`` is computed.

    One assignment of each token after the other: all at once would need K times the rows, however few are on this device.
    """

    def add(sum_XM: jax.Array, assignment: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place_X, weight_X = assignment
        return sum_XM + _rows_at(rows_RM, place_X, num_rows, wide) * weight_X[:, None], None

    wide = computed(what, rows_RM.dtype)
    zeros_XM = jnp.zeros((place_XK.shape[0], rows_RM.shape[1]), wide)
    return jax.lax.scan(add, zeros_XM, (place_XK.T, weights_XK.T.astype(wide)))[0]


def _rows_at(rows_RM: jax.Array, place_X: jax.Array, num_rows: jax.Array | int, dtype: jnp.dtype) -> jax.Array:
    """The row of one assignment of each token; zeros if no expert processed it."""
    row_XM = _at(rows_RM, jnp.minimum(place_X, rows_RM.shape[0] - 1)).astype(dtype)
    return jnp.where((place_X < num_rows)[:, None], row_XM, 0.0)


def _token_of(order: SortedAssignments, tokens: int, buffer_rows: int) -> jax.Array:
    """The token of each of the first ``buffer_rows`` assignments."""
    return order.assignment_N[:buffer_rows] // (order.assignment_N.shape[0] // tokens)


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
    sums of a token are reduce-scattered to its device. Otherwise an all-to-all sends the rows to their experts and back.
    """
    B, T, K = kept_experts_BTK.shape
    M, own = x_BTM.shape[-1], matrices.gate_EMF.shape[0]
    traffic, buffer_rows, sent = links.traffic, links.buffer_rows, links.sent.in_layer(low)
    assert (B, T, K, own) == (traffic.rows, traffic.tokens, traffic.top_k, traffic.experts), (
        kept_experts_BTK.shape,
        traffic,
    )
    alone = links.ring is not None or not links.axes
    with of_tensor("router.grouped"):
        x_XM = gathered(x_BTM.reshape(B * T, M), links.ring, sent.tokens if alone else None)
    with of_tensor("router.weights"):
        weights_XK = gathered(weights_BTK.reshape(B * T, K), links.ring)
    # The experts that assignments are sorted by: this device's own in a ring, otherwise all.
    group, first = (own, index_of(links.axes) * own) if links.ring else (experts.num, 0)
    with of_tensor("router.grouped_experts"):
        own_experts_X = jnp.subtract(gathered(kept_experts_BTK.reshape(-1), links.ring), first)
    expert_N = jnp.where((own_experts_X >= 0) & (own_experts_X < group), own_experts_X, group)
    order = sort_by_expert(expert_N, group)
    exchange = Exchange(
        axes=() if links.ring else links.axes,
        rows=expert_N.shape[0],
        buffer_rows=buffer_rows,
        chunk=min(traffic.to_one, buffer_rows),
    )
    routes = routes_of(order.sizes_E, exchange)

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
    with of_tensor("router.combined"):
        out_BTM = jnp.reshape(reduce_scattered(out_XM.astype(kept_in("combined", x_BTM.dtype)), links.ring), (B, T, M))
    return out_BTM, routes.overflow


def _one_hot(expert: jax.Array, experts: int) -> jax.Array:
    """A boolean one-hot encoding along a new last dim."""
    return expert[..., None] == jnp.arange(experts, dtype=expert.dtype).reshape((1,) * expert.ndim + (experts,))


def _count_by_expert(expert: jax.Array, experts: int) -> jax.Array:
    """The number of assignments of each expert."""
    return jnp.sum(_one_hot(expert.reshape(-1), experts), axis=0, dtype=jnp.int32)


def _at(array_XM: jax.Array, index: jax.Array) -> jax.Array:
    return array_XM.at[index].get(mode="promise_in_bounds")
