"""The router: each token's top-k experts and their weights, by softmax, or by sigmoid limited to groups with a balancing bias.

B rows, L tokens, M embed, E experts, K experts of a token, N groups of experts, X experts of a group; Z layers
of a stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwright.core.program.primitives import Route
from shardwright.engine_torch.io.dtypes import kept
from shardwright.models.layers.ends import NO_DOCUMENT


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    experts_BLK: torch.Tensor
    weights_BLK: torch.Tensor


def routed_tokens(segments_BL: torch.Tensor) -> torch.Tensor:
    """Which tokens are routed, BL: those of a document. Made once a step for all layers."""
    return segments_BL != NO_DOCUMENT


def route(products_BLE: torch.Tensor, routed_BL: torch.Tensor, bias_E: torch.Tensor | None, form: Route) -> Routing:
    """Route each token. ``products_BLE``: of the tokens and the router's weight. ``routed_BL``: ``routed_tokens``; others have the number of
    an expert that there is not. ``bias_E`` affects which experts are chosen and not their weights.

    Source: arXiv:2412.19437, equations 12 to 16; arXiv:2401.04088, section 2.1.
    """
    sigmoid = form.scoring == "sigmoid"
    scores_BLE = products_BLE.sigmoid() if sigmoid else products_BLE.softmax(dim=-1)
    ranked_BLE = scores_BLE.detach()
    if bias_E is not None:
        ranked_BLE = ranked_BLE + bias_E.to(products_BLE.dtype)
    if form.num_groups > 1:
        ranked_BLE = _in_best_groups(ranked_BLE, form, best_of_group=2 if sigmoid else 1)
    _, experts_BLK = top_k(ranked_BLE, form.top_k)
    weights_BLK = scores_BLE.gather(-1, experts_BLK)
    if form.normalized:
        weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + 1e-20)
    weights_BLK = (weights_BLK * form.scale).to(kept("router", products_BLE.dtype))
    # In the table's dtype, because they are sent.
    return Routing(torch.where(routed_BL[..., None], experts_BLK, products_BLE.shape[-1]).to(torch.int32), weights_BLK)


def top_k(x: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``num`` largest entries along the last dim, with their indices, largest first, ties by index.

    Sorted, because ``topk`` does not specify how it breaks ties.
    """
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :num], indices[..., :num]


def updated_bias(bias_ZE: torch.Tensor, counts_ZE: torch.Tensor, rate: float) -> torch.Tensor:
    """The balancing bias after a step: plus ``rate`` for experts below the mean load, minus ``rate`` for those above it.

    ``counts_ZE``: the assignments of each expert of each layer in the global step.
    Source: arXiv:2408.15664, algorithm 1.
    """
    counts_ZE = counts_ZE.float()
    violation_ZE = counts_ZE.mean(dim=-1, keepdim=True) - counts_ZE
    return bias_ZE + rate * violation_ZE.sign().to(bias_ZE.dtype)


def _in_best_groups(scores_BLE: torch.Tensor, form: Route, best_of_group: int) -> torch.Tensor:
    """The scores, with minus infinity for experts outside the best groups."""
    scores_BLNX = scores_BLE.unflatten(-1, (form.num_groups, -1))
    best, _ = top_k(scores_BLNX, best_of_group)
    _, chosen = top_k(best.sum(dim=-1), form.chosen_groups)
    is_chosen_BLN = torch.zeros(scores_BLNX.shape[:-1], dtype=torch.bool, device=scores_BLE.device)
    is_chosen_BLN = is_chosen_BLN.scatter(-1, chosen, True)
    return scores_BLNX.masked_fill(~is_chosen_BLN[..., None], float("-inf")).flatten(-2)
