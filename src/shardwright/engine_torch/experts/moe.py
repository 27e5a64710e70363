"""A layer of experts: choices sorted by expert, sent to their experts, and put together again where their tokens are.

B rows, L tokens, M embed, E experts, K experts of a token, as the router has them; B rows of T tokens where they are
dispatched from; S tokens of one tile; X tokens in all, N choices that an expert takes; all on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.engine_torch.experts.exchange import from_experts, gathered, routes_of, summed_parts, to_experts
from shardwright.engine_torch.experts.grouped import Matrices, grouped_swiglu
from shardwright.engine_torch.experts.routing import route
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.dtypes import kept as kept_in
from shardwright.engine_torch.io.layer_io import ExpertLinks, Links, Params
from shardwright.engine_torch.io.redistribute import gathered as gathered_parts
from shardwright.models.parts.architecture import Experts
from shardwright.models.parts.ends import NO_DOCUMENT


class MoeCounts(NamedTuple):
    """What became of the choices of a rank's tokens.

    ``by_expert``: those of each expert, dropped ones too, E. ``dropped``: those that came after an expert's capacity.
    ``overflow``: those that came to this rank beyond the room that a layout gives it. Every token is counted by the one
    rank that dispatches it, so that the sums over the axes that cut ``router.grouped`` are those of the global batch.
    """

    by_expert: torch.Tensor
    dropped: torch.Tensor
    overflow: torch.Tensor


def seen_by_experts(segments_BL: torch.Tensor, links: Links) -> torch.Tensor:
    """Which tokens are no padding, BL, as the router has them; ``segments_BL`` as the input has them."""
    return links.move("input.segments", "router.valid", segments_BL) != NO_DOCUMENT


def experts_layer(
    x_BLM: torch.Tensor, valid_BL: torch.Tensor, weights: Params, experts: Experts, links: Links
) -> tuple[torch.Tensor, MoeCounts]:
    """What the routed experts add to the residual stream, BLM, of which ``x_BLM`` is a normed copy.

    ``valid_BL``: see ``seen_by_experts``.
    """
    x_BLM = links.move("residual.stream", "router.input", x_BLM)
    routing = route(x_BLM, weights["router.kernel"], weights.get("router.bias"), experts)
    # As wide as the table has them: they travel.
    seen_BLK = torch.where(valid_BL[..., None], routing.experts_BLK, experts.num).to(torch.int32)

    x_BTM = links.move("router.input", "router.grouped", x_BLM)
    chosen_BTK = links.move("router.experts", "router.grouped_experts", seen_BLK)
    weights_BTK = links.move("router.chosen", "router.weights", routing.weights_BLK)
    kept_BTK = kept(chosen_BTK, experts, links.experts)
    dropped = ((chosen_BTK < experts.num) & ~kept_BTK).sum()
    matrices = Matrices(weights["moe.gate"], weights["moe.up"], weights["moe.down"])
    taken_BTK = torch.where(kept_BTK, chosen_BTK, experts.num)
    out_BTM, overflow = _seen_by_experts(x_BTM, taken_BTK, weights_BTK, matrices, experts, links.experts)
    out_BLM = links.move("router.combined", "router.output", out_BTM)
    counts = MoeCounts(_counted(chosen_BTK, experts.num), dropped, overflow)
    return links.move("router.output", "residual.stream", out_BLM), counts


def kept(chosen_BTK: torch.Tensor, experts: Experts, links: ExpertLinks) -> torch.Tensor:
    """Which choices their experts take, BTK; ``chosen_BTK`` is ``experts.num`` where no expert sees the token.

    An expert takes the first of a row, up to its capacity. The place of a choice is that in the whole row, as it is
    written, so that neither the ranks that share a row nor the order in which it lies changes what is dropped.
    """
    T = chosen_BTK.shape[1]
    sees_BTK, ranks, capacity = chosen_BTK < experts.num, links.row.size, links.capacity
    if capacity is None:
        return sees_BTK
    own = len(links.tiles) // ranks
    of_token_BTE = functional.one_hot(chosen_BTK.long(), experts.num + 1)[..., : experts.num].sum(dim=2)
    of_token_BISE = of_token_BTE.unflatten(1, (own, T // own))
    of_tile_BIE = of_token_BISE.sum(dim=2)
    of_all_BJE = gathered_parts(of_tile_BIE, 1, links.row)
    tile_J = torch.tensor(links.tiles, device=chosen_BTK.device)
    tile_I = tile_J.narrow(0, links.row.index * own, own)
    earlier_IJ = (tile_J[None] < tile_I[:, None]).to(of_all_BJE.dtype)
    before_BIE = torch.einsum("ij,bje->bie", earlier_IJ, of_all_BJE)
    place_BISE = of_token_BISE.cumsum(dim=2) - of_token_BISE + before_BIE[:, :, None]
    full_BTE = functional.pad(place_BISE.flatten(1, 2) >= capacity, (0, 1))
    return sees_BTK & ~full_BTE.gather(-1, chosen_BTK.long())


def _seen_by_experts(
    x_BTM: torch.Tensor,
    taken_BTK: torch.Tensor,
    weights_BTK: torch.Tensor,
    matrices: Matrices,
    experts: Experts,
    links: ExpertLinks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts make of the tokens that they take, weighed and summed by token, and the choices without room.

    Around a ring every rank has all tokens of the group, sees the choices of its own experts alone, and a token's parts
    are summed where it came from. Otherwise the choices travel.
    """
    B, T, K = taken_BTK.shape
    M, own = x_BTM.shape[-1], matrices.gate_EFM.shape[0]
    x_XM, weights_XK, taken_XK = x_BTM.flatten(0, 1), weights_BTK.flatten(0, 1), taken_BTK.flatten(0, 1)
    group = experts.num
    if links.ring:
        x_XM, weights_XK, taken_XK = (gathered(part, links.peers) for part in (x_XM, weights_XK, taken_XK))
        group, first = own, links.peers.index * own
        taken_XK = torch.where((taken_XK >= first) & (taken_XK < first + own), taken_XK - first, own)
    expert_N = taken_XK.flatten()
    order_N = expert_N.argsort(stable=True)
    sizes_E = _counted(taken_XK, group)
    # Choices that no expert takes come last.
    # Around the ring, a rank's experts have their part of the choices of all.
    num = sum(links.how_many(sizes_E, taken_XK.numel() * group // experts.num))
    assignment_N = order_N[:num]
    rows_NM = dispatch_rows(x_XM, assignment_N // K)
    if links.ring:
        y_NM, came = grouped_swiglu(rows_NM, matrices, sizes_E, links.how_many), num
    else:
        routes = routes_of(sizes_E, num, links.peers, links.how_many)
        came_RM = to_experts(rows_NM, routes, links.peers)
        y_RM = grouped_swiglu(came_RM, matrices, routes.sizes_E, links.how_many)
        y_NM, came = from_experts(y_RM, routes, links.peers), sum(routes.came_D)
    # A sum of a few rows: no product of matrices.
    wide = computed("combined", y_NM.dtype)
    weighed_NM = y_NM.to(wide) * weights_XK.flatten()[assignment_N].to(wide)[:, None]
    out_XM = torch.zeros(x_XM.shape, dtype=wide, device=x_XM.device).index_add(0, assignment_N // K, weighed_NM)
    out_XM = out_XM.to(kept_in("combined", x_BTM.dtype))
    if links.ring:
        out_XM = summed_parts(out_XM, links.peers)
    overflow = max(0, came - links.buffer_rows) if links.buffer_rows is not None else 0
    return out_XM.view(B, T, M), torch.tensor(overflow, device=x_BTM.device)


def dispatch_rows(x_XM: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """The tokens of choices, NM. A token's slope is the sum over its choices."""
    return _Chosen.apply(x_XM, token_N)  # pyright: ignore[reportReturnType]


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_XM: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.num = x_XM.shape[0]
        ctx.save_for_backward(token_N)
        return x_XM[token_N]

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (token_N,), cotangent_NM = ctx.saved_tensors, cotangents[0]
        wide = computed("cotangent", cotangent_NM.dtype)
        sums_XM = torch.zeros(ctx.num, cotangent_NM.shape[1], dtype=wide, device=cotangent_NM.device)
        return sums_XM.index_add_(0, token_N, cotangent_NM.to(wide)).to(kept_in("cotangent", cotangent_NM.dtype)), None


def _counted(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How many choices each expert has."""
    flat = chosen.flatten().long()
    # No ``bincount``: on a GPU it waits for the largest number, which is known.
    return torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))[
        :experts
    ]
