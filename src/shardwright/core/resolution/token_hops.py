"""The exchanges by which tokens are sent to their experts, and back in reverse.

| `move: {moe: ...}` | exchanges | a device sends |
|---|---|---|
| all-to-all | one, over all axes of the experts | a row to each expert of a token |
| two-hops | over the first of these axes, then over the others | a token once to each of its nodes, which has it on the device with this one's place in its own node; from there a row to each of the token's experts in the node |

A node is what the first axis counts: the experts are sharded over it first, so each node has consecutive ones. Sums of a token's experts
are made in the node before they are sent back. How many nodes a token has depends on the routing. An even routing chooses the groups of
experts, and the experts in them, with the same probability each:

| groups of experts | nodes of a token |
|---|---|
| one, or those that no node divides | D (1 - C(E - E/D, k) / C(E, k)) |
| whole ones in a node, or a part of one | the same among the experts of the chosen groups, in the mean over the choices of groups |

D nodes, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, comb

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.capacity import ROOM_FOR_ALL
from shardwright.core.model.table import ModelTable
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import dispatched_dim, expert_axes, traffic_of

TWO_HOPS = "two-hops"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHop:
    """One exchange of rows over ``axes``, in one layer and microbatch. A device sends and receives ``even_rows`` if the routing is even, and
    at most ``rows``, of which at most ``chunk`` to one other; it has a buffer for ``buffer_rows`` received ones."""

    axes: tuple[str, ...]
    even_rows: int
    rows: int
    buffer_rows: int
    chunk: int


def token_hops(request: Request, mesh: Mesh) -> tuple[TokenHop, ...]:
    """The exchanges of a dispatch, in their order: one, or two where two axes or more shard the experts. Where nothing shards them the one
    has no axes."""
    axes, traffic, factor = expert_axes(request.layout, mesh), traffic_of(request, mesh), request.expert_buffer
    buffer_rows, assignments = traffic.buffer_rows(factor), traffic.assignments
    last = TokenHop(
        axes=axes,
        even_rows=assignments,
        rows=assignments,
        buffer_rows=buffer_rows,
        chunk=min(traffic.to_one, buffer_rows),
    )
    if not in_two_hops(request, mesh):
        return (last,)
    nodes, tokens = mesh.size(axes[:1]), traffic.rows * traffic.tokens
    even = ceil(tokens * nodes_of_a_token(request.table, nodes))
    # What the devices of one place in all nodes may send to one of them, which sends it on.
    node = replace(
        traffic,
        devices=nodes,
        experts=traffic.experts * traffic.devices // nodes,
        row_shards=nodes if dispatched_dim(request.layout, axes[0]) == "groups" else 1,
    )
    # As many tokens as have these assignments in an even routing.
    shares = node.buffer_rows(None) / node.assignments if factor is None else factor
    tokens_held = ceil(min(nodes * tokens, shares * even))
    passed_on = min(max(assignments, node.buffer_rows(factor)), max(1, tokens_held) * min(traffic.top_k, node.experts))
    return (
        TokenHop(
            axes=axes[:1],
            even_rows=even,
            rows=tokens * most_nodes(request.table, nodes),
            buffer_rows=max(1, tokens_held),
            chunk=min(tokens, max(1, tokens_held)),
        ),
        replace(
            last,
            axes=axes[1:],
            rows=passed_on,
            chunk=min(passed_on, tokens_held * min(traffic.top_k, traffic.experts), buffer_rows),
        ),
    )


def rows_sent_on(request: Request, mesh: Mesh) -> Mapping[str, Mapping[str, int]]:
    """By the name of an activation, the sizes that differ from the request's: what is dispatched to experts, and what is returned, is on
    the device that sends it on, which has room for more than the rows of one device's tokens."""
    if not in_two_hops(request, mesh):
        return {}
    traffic, (_, inner) = traffic_of(request, mesh), token_hops(request, mesh)
    of_a_token = {"top_k": ceil(inner.rows / (traffic.rows * traffic.tokens))}
    ends = {"dispatch": "source", "combine": "target"}
    # A stage may have no layer with experts.
    return {getattr(move, ends[move.kind]): of_a_token for move in request.table.moves if move.kind in ends}


def may_overflow(request: Request, mesh: Mesh) -> bool:
    """Whether a device may receive more than its buffers hold."""
    # A model of dense layers alone may be of a family with experts.
    if request.table.top_k is None or "experts" not in request.table.sizes:
        return False
    largest = token_hops(replace(request, expert_buffer=ROOM_FOR_ALL), mesh)
    return any(hop.buffer_rows < most.buffer_rows for hop, most in zip(token_hops(request, mesh), largest, strict=True))


def in_two_hops(request: Request, mesh: Mesh) -> bool:
    """Whether tokens are sent to nodes first, and inside them then: where two axes or more shard the experts."""
    return request.layout.move_moe == TWO_HOPS and len(expert_axes(request.layout, mesh)) > 1


def nodes_of_a_token(table: ModelTable, nodes: int) -> float:
    """How many of ``nodes`` have an expert of a token, in the mean over tokens of an even routing.

    >>> from shardwright.models import build
    >>> [round(nodes_of_a_token(build("deepseek3-671b"), nodes), 2) for nodes in (1, 2, 4, 8, 16)]
    [1.0, 1.93, 2.93, 3.63, 5.34]
    >>> [round(nodes_of_a_token(build("mixtral-8x7b"), nodes), 2) for nodes in (2, 4, 8)]
    [1.57, 1.86, 2.0]
    """
    experts, chosen = table.sizes["experts"], table.top_k or table.sizes["experts"]
    of_node, of_group = experts // nodes, experts // table.expert_groups
    if of_node % of_group and of_group % of_node:
        of_group, groups, chosen_groups = experts, 1, 1
    else:
        groups, chosen_groups = table.expert_groups, table.chosen_groups
    # A node has so many groups whole, or a part of one.
    whole, part = max(1, of_node // of_group), min(of_node, of_group)
    routed = chosen_groups * of_group
    missed = sum(
        comb(whole, have)
        * comb(groups - whole, chosen_groups - have)
        / comb(groups, chosen_groups)
        * comb(routed - have * part, chosen)
        / comb(routed, chosen)
        for have in range(min(whole, chosen_groups) + 1)
    )
    return nodes * (1 - missed)


def most_nodes(table: ModelTable, nodes: int) -> int:
    """The most nodes that may have an expert of one token.

    >>> from shardwright.models import build
    >>> [most_nodes(build("deepseek3-671b"), nodes) for nodes in (2, 8, 16)], most_nodes(build("mixtral-8x7b"), 8)
    ([2, 4, 8], 2)
    """
    experts = table.sizes["experts"]
    of_node, of_group = max(1, experts // nodes), experts // table.expert_groups
    of_one_group = max(1, of_group // of_node) if of_node % of_group == 0 or of_group % of_node == 0 else nodes
    limit = nodes if table.expert_groups == 1 else table.chosen_groups * of_one_group
    return min(nodes, table.top_k or experts, limit)
