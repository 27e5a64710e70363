"""A layer of experts: token-expert assignments sorted by expert, dispatched to their experts, and combined by token.

B rows, L tokens, M embed, E experts, K experts of a token, as the router has them; B rows of T tokens as they are dispatched;
S tokens of one tile; I tiles of a rank, J tiles of all; X tokens in all; N assignments that an expert processes; R rows
sorted by expert. All others are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.program.walk import ExpertGroup
from shardwright.core.quantization.dispatch import SentRows
from shardwright.engine_torch.experts.exchange import (
    from_experts,
    gathered,
    reduce_scattered,
    routes_of,
    to_experts,
    with_quantized_cotangent,
)
from shardwright.engine_torch.experts.grouped import Matrices, grouped_swiglu
from shardwright.engine_torch.experts.nodes import Tokens, by_way_of_nodes
from shardwright.engine_torch.experts.rows import count_by_expert, dispatch_rows, sum_by_token
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.dtypes import kept as kept_in
from shardwright.engine_torch.io.layer_io import ExpertLinks, LowPrecision
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.io.redistribute import gathered as all_gathered


class MoeCounts(NamedTuple):
    """Counts of the token-expert assignments of a rank's tokens.

    ``by_expert``: those of each expert, dropped ones included, E. ``dropped``: those beyond an expert's capacity.
    ``overflow``: those that this rank received beyond the buffer capacity that a layout sets. Every token is counted by the
    one rank that dispatches it, so that the sums over the axes that shard ``router.grouped`` are those of the global batch.
    """

    by_expert: torch.Tensor
    dropped: torch.Tensor
    overflow: torch.Tensor


def through_experts(
    x_BTM: torch.Tensor,
    experts_BTK: torch.Tensor,
    weights_BTK: torch.Tensor,
    matrices: Matrices,
    group: ExpertGroup,
    links: ExpertLinks,
    low: Mapping[str, LowPrecision],
) -> tuple[torch.Tensor, MoeCounts]:
    """The sum of each token's experts, BTM, and what is counted. ``group``: what is done, under which names; ``low``: by the names of weights.

    Assignments beyond the capacity of a rank's buffer are processed and counted.
    """
    num = group.num_experts
    kept_BTK = within_capacity(experts_BTK, num, links)
    dropped = ((experts_BTK < num) & ~kept_BTK).sum()
    kept_experts_BTK = torch.where(kept_BTK, experts_BTK, num)
    out_BTM, overflow = _expert_outputs(x_BTM, kept_experts_BTK, weights_BTK, matrices, group, links, low)
    return out_BTM, MoeCounts(count_by_expert(experts_BTK, num), dropped, overflow)


def within_capacity(experts_BTK: torch.Tensor, num: int, links: ExpertLinks) -> torch.Tensor:
    """Which assignments are within their experts' capacity, BTK. ``experts_BTK`` is ``num``, of all experts, for padding tokens.

    An expert keeps the first assignments of a row, up to its capacity. They are counted over the full row in the order of the
    text. So neither the ranks that share a row nor the order of its chunks changes which assignments are dropped.
    """
    T = experts_BTK.shape[1]
    valid_BTK, ranks, capacity = experts_BTK < num, links.row.size, links.capacity
    if capacity is None:
        return valid_BTK
    own = len(links.tiles) // ranks
    of_token_BTE = functional.one_hot(experts_BTK.long(), num + 1)[..., :num].sum(dim=2)
    of_token_BISE = of_token_BTE.unflatten(1, (own, T // own))
    of_tile_BIE = of_token_BISE.sum(dim=2)
    of_all_BJE = all_gathered(of_tile_BIE, 1, links.row)
    tile_J = torch.tensor(links.tiles, device=experts_BTK.device)
    tile_I = tile_J.narrow(0, links.row.index * own, own)
    earlier_IJ = (tile_J[None] < tile_I[:, None]).to(of_all_BJE.dtype)
    before_BIE = torch.einsum("ij,bje->bie", earlier_IJ, of_all_BJE)
    place_BISE = of_token_BISE.cumsum(dim=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = functional.pad(place_BISE.flatten(1, 2) >= capacity, (0, 1))
    return valid_BTK & ~full_BTE.gather(-1, experts_BTK.long())


def _expert_outputs(
    x_BTM: torch.Tensor,
    kept_experts_BTK: torch.Tensor,
    weights_BTK: torch.Tensor,
    matrices: Matrices,
    group: ExpertGroup,
    links: ExpertLinks,
    low: Mapping[str, LowPrecision],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the experts, weighted and summed by token, and the number of assignments that overflow a buffer.

    In a ring every rank gathers all tokens of the group and processes the assignments of its own experts only; the partial
    sums of a token are reduce-scattered to its rank. Otherwise an all-to-all sends the rows to their experts and back, in the nodes that
    tokens were sent to before if it takes two hops.
    """
    tokens = Tokens(x_BTM.flatten(0, 1), kept_experts_BTK.flatten(0, 1), weights_BTK.flatten(0, 1))
    sent = links.sent.in_layer(low)

    def outputs(tokens: Tokens, experts: int) -> tuple[torch.Tensor, int]:
        return _outputs_of(tokens, experts, matrices, group, links, sent, low)

    if links.nodes.group is not None:
        out_XM, received = by_way_of_nodes(tokens, group, links, sent.tokens, outputs)
    else:
        out_XM, received = outputs(tokens, group.num_experts)
    if links.ring:
        out_XM = reduce_scattered(out_XM, links.peers)
    overflow = max(0, received - links.buffer_rows) if links.buffer_rows is not None else 0
    return out_XM.view(x_BTM.shape), torch.tensor(overflow, device=x_BTM.device)


def _outputs_of(
    tokens: Tokens,
    experts: int,
    matrices: Matrices,
    group: ExpertGroup,
    links: ExpertLinks,
    sent: SentRows,
    low: Mapping[str, LowPrecision],
) -> tuple[torch.Tensor, int]:
    """The sums of tokens' outputs by the ``experts`` of a ring, or of the ranks of the last hop; and the assignments that this rank received."""
    x_XM, own_experts_XK, weights_XK = tokens
    own, K, num_experts = matrices.gate_EFM.shape[0], own_experts_XK.shape[1], experts
    dtype = x_XM.dtype
    if links.ring:
        x_XM = gathered(x_XM, links.peers, sent.tokens)
        weights_XK, own_experts_XK = (gathered(array, links.peers) for array in (weights_XK, own_experts_XK))
        num_experts, first = own, links.peers.index * own
        own_experts_XK = torch.where(
            (own_experts_XK >= first) & (own_experts_XK < first + own), own_experts_XK - first, own
        )
    expert_N = own_experts_XK.flatten()
    order_N = expert_N.argsort(stable=True)
    sizes_E = count_by_expert(own_experts_XK, num_experts)
    # Assignments that no expert processes are last. In a ring, an even share of all ranks' assignments is expected.
    expected = own_experts_XK.numel() * num_experts // experts if links.even_rows is None else links.even_rows
    num = sum(links.how_many(sizes_E, expected))
    assignment_N = order_N[:num]
    rows_NM = dispatch_rows(x_XM, assignment_N // K)
    rows, sent_rows, made = (step.output.name for step in (group.dispatch, group.sent, group.down))
    if links.ring:
        rows_NM, received = named(rows_NM, sent_rows), num
        y_NM = named(grouped_swiglu(rows_NM, matrices, sizes_E, group, links.how_many, low), made)
        y_NM = with_quantized_cotangent(y_NM, sent.cotangents)
    else:
        routes = routes_of(sizes_E, num, links.peers, links.how_many)
        rows_NM = named(rows_NM, rows)
        received_RM = named(to_experts(rows_NM, routes, links.peers, sent.tokens), sent_rows)
        y_RM = named(grouped_swiglu(received_RM, matrices, routes.sizes_E, group, links.how_many, low), made)
        y_NM = named(from_experts(y_RM, routes, links.peers, sent.cotangents), group.returned.output.name)
        received = sum(routes.received_D)
    wide = computed("combined", y_NM.dtype)
    weighted_NM = y_NM.to(wide) * weights_XK.flatten()[assignment_N].to(wide)[:, None]
    out_XM = sum_by_token(weighted_NM, assignment_N // K, x_XM.shape[0])
    return out_XM.to(kept_in("combined", dtype)), received
