"""A layer of experts: choices sorted by expert, sent to their experts, and put together again where their tokens are.

B rows, L tokens, M embed, E experts, K experts of a token, as the router has them; B rows of T tokens where they are
dispatched from; S tokens of one tile; N = B * T * K choices, R rows of the buffer of what comes; all on one device.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.experts.exchange import (
    Exchange,
    from_experts,
    gathered,
    routes_of,
    summed_parts,
    to_experts,
)
from shardwright.engine_jax.experts.grouped import grouped_swiglu
from shardwright.engine_jax.experts.grouped_blocks import Matrices
from shardwright.engine_jax.experts.routing import route
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.layer_io import ExpertLinks, Links, Params, index_of, size_of
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.models.parts.architecture import Experts
from shardwright.models.parts.ends import NO_DOCUMENT


class MoeCounts(NamedTuple):
    """What became of the choices of a device's tokens, int32.

    ``by_expert``: those of each expert, dropped ones too, E. ``dropped``: those that came after an expert's capacity.
    ``overflow``: those that a buffer had no room for. Every token is counted by the one device that dispatches it, so
    that the sums over the axes that cut ``router.grouped`` are those of the global batch.
    """

    by_expert: jax.Array
    dropped: jax.Array
    overflow: jax.Array


class Sorted(NamedTuple):
    """Choices in the order of their experts, those of a token that none sees last.

    A choice is a token with one of its experts, numbered ``token * K + which``. ``assignment_N``: the choice at each place;
    ``place_N``: the place of each choice; ``sizes_E``: choices of each expert.
    """

    assignment_N: jax.Array
    place_N: jax.Array
    sizes_E: jax.Array


def seen_by_experts(segments_BL: jax.Array, links: Links) -> jax.Array:
    """Which tokens are no padding, BL, as the router has them; ``segments_BL`` as the input has them."""
    return links.move("input.segments", "router.valid", segments_BL) != NO_DOCUMENT


def experts_layer(
    x_BLM: jax.Array, valid_BL: jax.Array, weights: Params, experts: Experts, links: Links
) -> tuple[jax.Array, MoeCounts]:
    """What the routed experts add to the residual stream, BLM, of which ``x_BLM`` is a normed copy.

    ``valid_BL``: see ``seen_by_experts``. Where a layout's buffer is smaller than what may come, what has no room is
    taken for nothing, and is counted.
    """
    among = links.experts
    assert among is not None
    x_BLM = links.move("residual.stream", "router.input", x_BLM)
    with of_component("router"):
        routing = route(x_BLM, weights["router.kernel"], weights.get("router.bias"), experts)
    seen_BLK = jnp.where(valid_BL[..., None], routing.experts_BLK, experts.num)

    x_BTM = links.move("router.input", "router.grouped", x_BLM)
    chosen_BTK = links.move("router.experts", "router.grouped_experts", seen_BLK)
    weights_BTK = links.move("router.chosen", "router.weights", routing.weights_BLK)
    with of_component("router"):
        kept_BTK = kept(chosen_BTK, experts, among)
    dropped = jnp.sum((chosen_BTK < experts.num) & ~kept_BTK, dtype=jnp.int32)
    matrices = Matrices(weights["moe.gate"], weights["moe.up"], weights["moe.down"])
    taken_BTK = jnp.where(kept_BTK, chosen_BTK, experts.num)
    with of_component("moe"):
        out_BTM, overflow = _seen_by_experts(x_BTM, taken_BTK, weights_BTK, matrices, experts, among)
    out_BLM = links.move("router.combined", "router.output", out_BTM)
    counts = MoeCounts(_counted(chosen_BTK, experts.num), dropped, overflow)
    return links.move("router.output", "residual.stream", out_BLM), counts


def kept(chosen_BTK: jax.Array, experts: Experts, links: ExpertLinks) -> jax.Array:
    """Which choices their experts take, BTK; ``chosen_BTK`` is ``experts.num`` where no expert sees the token.

    An expert takes the first of a row, up to its capacity. The place of a choice is that in the whole row, as it is
    written, so that neither the devices that share a row nor the order in which it lies changes what is dropped.
    """
    B, T, _ = chosen_BTK.shape
    sees_BTK, devices, capacity = chosen_BTK < experts.num, size_of(links.row), links.traffic.capacity
    if capacity is None:
        return sees_BTK
    own = len(links.tiles) // devices
    of_token_BTE = jnp.sum(_is(chosen_BTK, experts.num), axis=2, dtype=jnp.int32)
    of_token_BISE = of_token_BTE.reshape(B, own, T // own, experts.num)
    of_tile_BIE = jnp.sum(of_token_BISE, axis=2)
    of_all_BJE = jax.lax.all_gather(of_tile_BIE, links.row, axis=1, tiled=True) if links.row else of_tile_BIE
    tile_J = jnp.asarray(links.tiles, jnp.int32)
    tile_I = jax.lax.dynamic_slice_in_dim(tile_J, index_of(links.row) * own, own)
    earlier_IJ = tile_J[None] < tile_I[:, None]
    before_BIE = jnp.sum(jnp.where(earlier_IJ[None, :, :, None], of_all_BJE[:, None], 0), axis=2, dtype=jnp.int32)
    place_BISE = jnp.cumsum(of_token_BISE, axis=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = place_BISE.reshape(B, T, experts.num) >= capacity
    return sees_BTK & ~jnp.any(_is(chosen_BTK, experts.num) & full_BTE[:, :, None], axis=-1)


def sort_by_expert(expert_N: jax.Array, experts: int) -> Sorted:
    """Choices by expert, earlier ones first within each; those of ``experts`` and above are none's."""
    number_N = jnp.arange(expert_N.shape[0], dtype=jnp.int32)
    _, assignment_N = jax.lax.sort((expert_N, number_N), num_keys=1, is_stable=True)
    _, place_N = jax.lax.sort((assignment_N, number_N), num_keys=1)
    return Sorted(assignment_N, place_N, _counted(expert_N, experts))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch_rows(x_XM: jax.Array, order: Sorted, taken: jax.Array | int, buffer_rows: int) -> jax.Array:
    """The tokens of the first ``buffer_rows`` choices, in the order of the experts, RM. Only ``taken`` of them have a gradient."""
    del taken
    return _at(x_XM, _token_of(order, x_XM.shape[0], buffer_rows))


def _dispatch_rows_backward(
    buffer_rows: int, kept: tuple[Sorted, jax.Array | int, int], d_RM: jax.Array
) -> tuple[jax.Array, None, None]:
    # A token's gradient is the sum over its choices.
    order, taken, tokens = kept
    del buffer_rows
    place_XK = order.place_N.reshape(tokens, -1)
    d_XM = _summed("cotangent", d_RM, place_XK, jnp.ones(place_XK.shape, d_RM.dtype), taken)
    return d_XM.astype(kept_in("cotangent", d_RM.dtype)), None, None


dispatch_rows.defvjp(
    lambda x_XM, order, taken, buffer_rows: (
        dispatch_rows(x_XM, order, taken, buffer_rows),
        (order, taken, x_XM.shape[0]),
    ),
    _dispatch_rows_backward,
)


@jax.custom_vjp
def weighed_sum(y_RM: jax.Array, weights_XK: jax.Array, order: Sorted, taken: jax.Array | int) -> jax.Array:
    """Each token's sum over its choices, weighed, XM; of rows in the order of the experts the first ``taken``."""
    return _summed("combined", y_RM, order.place_N.reshape(weights_XK.shape), weights_XK, taken)


def _weighed_sum_backward(kept, d_XM: jax.Array):
    y_RM, weights_XK, order, taken = kept
    buffer_rows, place_XK = y_RM.shape[0], order.place_N.reshape(weights_XK.shape)
    weight_R = jnp.where(
        jnp.arange(buffer_rows) < taken, _at(weights_XK.reshape(-1), order.assignment_N[:buffer_rows]), 0
    )
    # The slope of what is given on in the rows' dtype: nothing is lost by taking it so.
    d_RM = _at(d_XM.astype(y_RM.dtype), _token_of(order, place_XK.shape[0], buffer_rows))
    wide = computed("cotangent", y_RM.dtype)
    d_y_RM = (d_RM.astype(wide) * weight_R[:, None]).astype(kept_in("cotangent", y_RM.dtype))

    def cotangent(place_X: jax.Array) -> jax.Array:
        return jnp.sum(_rows_at(y_RM, place_X, taken, wide) * d_XM, axis=1)

    return d_y_RM, jax.lax.map(cotangent, place_XK.T).T.astype(weights_XK.dtype), None, None


weighed_sum.defvjp(lambda *given: (weighed_sum(*given), given), _weighed_sum_backward)


def _summed(
    what: str, rows_RM: jax.Array, place_XK: jax.Array, weights_XK: jax.Array, taken: jax.Array | int
) -> jax.Array:
    """Each token's sum over its choices, weighed, XM, in the dtype in which ``what`` is computed.

    One choice after the other: all rows at once would be K times the tokens, whatever part of them is here.
    """

    def add(sum_XM: jax.Array, choice: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place_X, weight_X = choice
        return sum_XM + _rows_at(rows_RM, place_X, taken, wide) * weight_X[:, None], None

    wide = computed(what, rows_RM.dtype)
    nothing = jnp.zeros((place_XK.shape[0], rows_RM.shape[1]), wide)
    return jax.lax.scan(add, nothing, (place_XK.T, weights_XK.T.astype(wide)))[0]


def _rows_at(rows_RM: jax.Array, place_X: jax.Array, taken: jax.Array | int, dtype: jnp.dtype) -> jax.Array:
    """The row of one choice of each token; zeros where no expert takes it."""
    row_XM = _at(rows_RM, jnp.minimum(place_X, rows_RM.shape[0] - 1)).astype(dtype)
    return jnp.where((place_X < taken)[:, None], row_XM, 0.0)


def _token_of(order: Sorted, tokens: int, buffer_rows: int) -> jax.Array:
    """The token of each of the first choices."""
    return order.assignment_N[:buffer_rows] // (order.assignment_N.shape[0] // tokens)


def _seen_by_experts(
    x_BTM: jax.Array,
    taken_BTK: jax.Array,
    weights_BTK: jax.Array,
    matrices: Matrices,
    experts: Experts,
    links: ExpertLinks,
) -> tuple[jax.Array, jax.Array]:
    """What experts make of the tokens that they take, weighed and summed by token, and the choices without room.

    Around a ring every device has all tokens of the group, sees the choices of its own experts alone, and a token's
    parts are summed where it came from. Otherwise the choices travel.
    """
    B, T, K = taken_BTK.shape
    M, own = x_BTM.shape[-1], matrices.gate_EMF.shape[0]
    traffic, buffer_rows = links.traffic, links.buffer_rows
    assert (B, T, K, own) == (traffic.rows, traffic.tokens, traffic.top_k, traffic.experts), (taken_BTK.shape, traffic)
    with of_tensor("router.grouped"):
        x_XM = gathered(x_BTM.reshape(B * T, M), links.ring)
    with of_tensor("router.weights"):
        weights_XK = gathered(weights_BTK.reshape(B * T, K), links.ring)
    # All experts are those of the group that rows are exchanged in: this device's alone around a ring.
    group, first = (own, index_of(links.axes) * own) if links.ring else (experts.num, 0)
    with of_tensor("router.grouped_experts"):
        taken_X = jnp.subtract(gathered(taken_BTK.reshape(-1), links.ring), first)
    expert_N = jnp.where((taken_X >= 0) & (taken_X < group), taken_X, group)
    order = sort_by_expert(expert_N, group)
    way = Exchange(
        axes=() if links.ring else links.axes,
        rows=expert_N.shape[0],
        buffer_rows=buffer_rows,
        chunk=min(traffic.to_one, buffer_rows),
    )
    routes = routes_of(order.sizes_E, way)
    if way.axes:
        with of_tensor("router.grouped"):
            rows_RM = to_experts(dispatch_rows(x_XM, order, way.rows, way.rows), routes, way)
        y_RM = grouped_swiglu(rows_RM, matrices, routes.sizes_E, links.products)
        with of_tensor("router.combined"):
            y_NM = from_experts(y_RM, routes, way)
        out_XM = weighed_sum(y_NM, weights_XK, order, way.rows)
    else:
        taken = jnp.sum(routes.sizes_E)
        y_RM = grouped_swiglu(dispatch_rows(x_XM, order, taken, buffer_rows), matrices, routes.sizes_E, links.products)
        out_XM = weighed_sum(y_RM, weights_XK, order, taken)
    with of_tensor("router.combined"):
        out_BTM = jnp.reshape(summed_parts(out_XM.astype(kept_in("combined", x_BTM.dtype)), links.ring), (B, T, M))
    return out_BTM, routes.overflow


def _is(chosen: jax.Array, experts: int) -> jax.Array:
    """Whether each choice is each expert, with the experts along a last dim."""
    return chosen[..., None] == jnp.arange(experts, dtype=chosen.dtype).reshape((1,) * chosen.ndim + (experts,))


def _counted(chosen: jax.Array, experts: int) -> jax.Array:
    """How many choices each expert has."""
    return jnp.sum(_is(chosen.reshape(-1), experts), axis=0, dtype=jnp.int32)


def _at(array_XM: jax.Array, index: jax.Array) -> jax.Array:
    return array_XM.at[index].get(mode="promise_in_bounds")
