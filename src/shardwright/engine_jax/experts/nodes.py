"""Tokens that are sent once to each node that has one of their experts, and what the node's experts make of them back.

X tokens of a device, K experts of a token, D nodes, N pairs of a token and a node; R rows of the buffer of received tokens; M embed.

A token's experts and routing weights go with it. The device that receives it in a node spreads it there, and sums the outputs of the node's
experts. So each token has one sum of each node, and these are summed in the order of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.program.walk import ExpertGroup
from shardwright.core.recipes.recipe import Quantizer
from shardwright.core.resolution.token_hops import TokenHop
from shardwright.engine_jax.experts.exchange import Exchange, from_experts, numbers_to_experts, routes_of, to_experts
from shardwright.engine_jax.experts.rows import combine_rows, dispatch_rows, one_hot, sort_by_expert, token_of, within
from shardwright.engine_jax.io.layer_io import index_of, size_of
from shardwright.engine_jax.io.scopes import of_tensor


class Tokens(NamedTuple):
    """Tokens with their experts, from 0, and routing weights. A number of an expert that there is not is no assignment."""

    x_XM: jax.Array
    experts_XK: jax.Array
    weights_XK: jax.Array


def by_way_of_nodes(
    tokens: Tokens,
    experts: int,
    hop: TokenHop,
    quantizer: Quantizer | None,
    outputs_in_node: Callable[[Tokens, int], tuple[jax.Array, jax.Array]],
    group: ExpertGroup,
) -> tuple[jax.Array, jax.Array]:
    """The sums of the outputs of a token's experts, XM, and how many tokens or assignments overflowed. ``quantizer``: of the tokens.

    ``outputs_in_node``: the same for tokens on the devices of a node and the experts that are there.
    """
    nodes = size_of(hop.axes)
    of_node = experts // nodes
    has_XD = jnp.any(one_hot(tokens.experts_XK // of_node, nodes), axis=1)
    node_N = jnp.where(has_XD, jnp.arange(nodes, dtype=jnp.int32), nodes).reshape(-1)
    order = sort_by_expert(node_N, nodes)
    exchange = Exchange(axes=hop.axes, rows=hop.rows, buffer_rows=hop.buffer_rows, chunk=hop.chunk)
    sizes_D, beyond = within(order.sizes_E, exchange.rows)
    routes = routes_of(sizes_D, exchange)
    with of_tensor(group.tokens.name):
        rows_NM = dispatch_rows(tokens.x_XM, order, exchange.rows, exchange.rows)
        x_RM: Any = to_experts(rows_NM, routes, exchange, quantizer)
    with of_tensor(group.weights.name):
        weights_NK = dispatch_rows(tokens.weights_XK, order, exchange.rows, exchange.rows)
        weights_RK = checkpoint_name(to_experts(weights_NK, routes, exchange), group.weights.name)
    with of_tensor(group.experts.name):
        experts_NK = tokens.experts_XK[token_of(order, tokens.x_XM.shape[0], exchange.rows)]
        experts_RK = numbers_to_experts(experts_NK, routes, exchange)
        experts_RK = checkpoint_name(experts_RK, group.experts.name)
    # Of tokens that nobody sent there are arbitrary numbers.
    sent_R1 = (jnp.arange(exchange.buffer_rows) < jnp.sum(routes.sizes_E))[:, None]
    own_experts_RK = experts_RK - index_of(hop.axes) * of_node
    is_own_RK = sent_R1 & (own_experts_RK >= 0) & (own_experts_RK < of_node)
    received = Tokens(
        x_XM=x_RM,
        experts_XK=jnp.where(is_own_RK, own_experts_RK, of_node),
        weights_XK=jnp.where(sent_R1, weights_RK, 0),
    )
    out_RM, overflow = outputs_in_node(received, of_node)
    with of_tensor(group.output.name):
        out_NM: Any = from_experts(out_RM, routes, exchange)
    out_XM = combine_rows(out_NM, jnp.ones(has_XD.shape, out_NM.dtype), order, exchange.rows)
    return out_XM.astype(out_RM.dtype), overflow + routes.overflow + beyond
