"""Softmax attention over the keys that a rank has: which a query sees, and what it takes of their values.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim; X = B * K, t = G * T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.layers.product import product

UNSEEN = torch.finfo(torch.float32).min
"""The score of a key that a query does not see. A query that sees none takes the mean of all values."""


class AttentionMask(NamedTuple):
    """What decides which keys a query sees: those of its own document (segment), not later than itself."""

    positions_BT: torch.Tensor
    segments_BT: torch.Tensor
    kv_positions_BS: torch.Tensor
    kv_segments_BS: torch.Tensor

    def visible(self) -> torch.Tensor:
        """Whether a query sees a key, BTS."""
        same_BTS = self.segments_BT[:, :, None] == self.kv_segments_BS[:, None, :]
        return same_BTS & (self.positions_BT[:, :, None] >= self.kv_positions_BS[:, None, :])


class Running(NamedTuple):
    """Attention to some of the keys: the largest score, and sums of e to the score less that largest one.

    No gradient goes through ``largest``: whatever is taken off all scores of a query leaves its shares as they are.
    """

    largest_BKGT: torch.Tensor
    weight_BKGT: torch.Tensor
    sum_BKGTE: torch.Tensor


def attend(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKE: torch.Tensor, mask: AttentionMask, scale: float
) -> torch.Tensor:
    """Softmax attention, BTHE. Queries of head ``h`` meet KV head ``h // (H / K)``. Each sees a key, its own."""
    mask_B1TS = mask.visible()[:, None]
    q_BHTD, k_BKSD, v_BKSE = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKE))
    out_BHTE = functional.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSE, attn_mask=mask_B1TS, scale=scale, enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1]
    )
    return out_BHTE.transpose(1, 2)


def with_keys(
    before: Running | None,
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> Running:
    """Attention to these keys and to all ``before``."""
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    by_kv_head = (B, K, H // K, T)
    q_XtD = q_BTHD.reshape(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B * K, -1, D)
    k_XDS = k_BSKD.permute(0, 2, 3, 1).flatten(0, 1)
    scores_BKGTS = product(q_XtD, k_XDS, computed("scores", q_BTHD.dtype)).view(*by_kv_head, -1) * scale
    scores_BKGTS = scores_BKGTS.masked_fill(~mask.visible()[:, None, None], UNSEEN)
    largest_BKGT = scores_BKGTS.detach().amax(dim=-1)
    if before is not None:
        largest_BKGT = torch.maximum(before.largest_BKGT, largest_BKGT)
    probs_BKGTS = (scores_BKGTS - largest_BKGT[..., None]).exp()
    weight_BKGT = probs_BKGTS.sum(dim=-1)
    probs_XtS = probs_BKGTS.to(kept("probabilities", v_BSKE.dtype)).view(B * K, -1, k_BSKD.shape[1])
    v_XSE = v_BSKE.transpose(1, 2).flatten(0, 1)
    sum_BKGTE = product(probs_XtS, v_XSE, computed("attention", v_BSKE.dtype)).view(*by_kv_head, -1)
    if before is not None:
        kept_BKGT = (before.largest_BKGT - largest_BKGT).exp()
        weight_BKGT = before.weight_BKGT * kept_BKGT + weight_BKGT
        sum_BKGTE = before.sum_BKGTE * kept_BKGT[..., None] + sum_BKGTE
    return Running(largest_BKGT, weight_BKGT, sum_BKGTE)


def finished(running: Running, dtype: torch.dtype) -> torch.Tensor:
    """What queries take of all keys that were run through, BTHE. ``dtype``: that of the computation."""
    out_BKGTE = running.sum_BKGTE / running.weight_BKGT[..., None]
    return out_BKGTE.permute(0, 3, 1, 2, 4).flatten(2, 3).to(kept("attention", dtype))
