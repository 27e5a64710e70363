"""Tokens that are sent once to each node that has one of their experts, and what the node's experts make of them back.

X tokens of a rank, K experts of a token, D nodes, N pairs of a token and a node; R received tokens; M embed.

A token's experts and routing weights go with it. The rank that receives it in a node spreads it there, and sums the outputs of the node's
experts. So each token has one sum of each node, and these are summed in the order of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.program.walk import ExpertGroup
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_torch.experts.exchange import from_experts, routes_of, to_experts
from shardwright.engine_torch.experts.rows import count_by_expert, dispatch_rows, sum_by_token
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.layer_io import ExpertLinks
from shardwright.engine_torch.io.recomputation import named


class Tokens(NamedTuple):
    """Tokens with their experts, from 0, and routing weights. A number of an expert that there is not is no assignment."""

    x_XM: torch.Tensor
    experts_XK: torch.Tensor
    weights_XK: torch.Tensor


def by_way_of_nodes(
    tokens: Tokens,
    group: ExpertGroup,
    links: ExpertLinks,
    quantizer: Quantizer | None,
    outputs_in_node: Callable[[Tokens, int], tuple[torch.Tensor, int]],
) -> tuple[torch.Tensor, int]:
    """The sums of the outputs of a token's experts, XM, and how many assignments this rank received. ``quantizer``: of the tokens.

    ``outputs_in_node``: the same for tokens on the ranks of a node and the experts that are there.
    """
    nodes, of_node = links.nodes.size, group.num_experts // links.nodes.size
    node_XK = (tokens.experts_XK // of_node).long()
    has_XD = functional.one_hot(node_XK, nodes + 1)[..., :nodes].any(dim=1)
    node_N = torch.where(has_XD, torch.arange(nodes, device=has_XD.device), nodes).flatten()
    sizes_D = count_by_expert(node_N, nodes)
    num = sum(links.how_many(sizes_D, links.even_tokens))
    token_N = node_N.argsort(stable=True)[:num] // nodes
    routes = routes_of(sizes_D, num, links.nodes, links.how_many)
    x_RM = to_experts(dispatch_rows(tokens.x_XM, token_N), routes, links.nodes, quantizer)
    weights_RK = named(to_experts(dispatch_rows(tokens.weights_XK, token_N), routes, links.nodes), group.weights.name)
    experts_RK = named(to_experts(tokens.experts_XK[token_N], routes, links.nodes), group.experts.name)
    own_experts_RK = experts_RK - links.nodes.index * of_node
    is_own_RK = (own_experts_RK >= 0) & (own_experts_RK < of_node)
    received = Tokens(x_RM, torch.where(is_own_RK, own_experts_RK, of_node), weights_RK)
    out_RM, assignments = outputs_in_node(received, of_node)
    out_NM = from_experts(out_RM, routes, links.nodes)
    wide = computed("combined", out_NM.dtype)
    out_XM = sum_by_token(out_NM.to(wide), token_N, tokens.x_XM.shape[0], ends_layer=True)
    return out_XM.to(out_RM.dtype), assignments
