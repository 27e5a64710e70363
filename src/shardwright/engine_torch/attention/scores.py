"""Softmax attention over the keys of a rank: the attention mask, and the weighted sum of values.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim, E value dim; X = B * K, t = G * T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.layers.product import product

MASKED_SCORE = torch.finfo(torch.float32).min
"""The score of a masked key. The output of a fully masked query is the mean of all values."""


class AttentionMask(NamedTuple):
    """Which keys a query attends to: those of its own document (segment) that are not later than itself. ``added_B1TS``: as ``added`` makes it,
    where all layers have the same. ``window``: how many positions before its own a query attends to, and how many after; -1: all."""

    positions_BT: torch.Tensor
    segments_BT: torch.Tensor
    kv_positions_BS: torch.Tensor
    kv_segments_BS: torch.Tensor
    added_B1TS: torch.Tensor | None = None
    window: tuple[int, int] = (-1, 0)

    def visible(self) -> torch.Tensor:
        """Whether a query attends to a key, BTS."""
        before, after = self.window
        visible_BTS = self.segments_BT[:, :, None] == self.kv_segments_BS[:, None, :]
        if after >= 0:
            last_BT = self.positions_BT + after if after else self.positions_BT
            visible_BTS = visible_BTS & (last_BT[:, :, None] >= self.kv_positions_BS[:, None, :])
        if before >= 0:
            first_BT = self.positions_BT - before
            visible_BTS = visible_BTS & (first_BT[:, :, None] <= self.kv_positions_BS[:, None, :])
        return visible_BTS

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores in an attention of this dtype, B1TS: 0, or minus infinity. Of a mask of truth values, each attention
        would make and keep one of its own."""
        visible_BTS = self.visible()
        return torch.zeros_like(visible_BTS, dtype=dtype).masked_fill_(~visible_BTS, -torch.inf)[:, None]


class OnlineSoftmax(NamedTuple):
    """Attention to some of the keys: the maximum score, and sums of exp(score - maximum), alone and times the values.

    No gradient goes through ``max``: subtracting one number from all scores of a query does not change its probabilities.
    """

    max_BKGT: torch.Tensor
    normalizer_BKGT: torch.Tensor
    sum_BKGTE: torch.Tensor


def attend(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKE: torch.Tensor, mask: AttentionMask, scale: float
) -> torch.Tensor:
    """Softmax attention, BTHE. Queries of head ``h`` attend to KV head ``h // (H / K)``, and each at least to its own key."""
    mask_B1TS = mask.added(q_BTHD.dtype) if mask.added_B1TS is None else mask.added_B1TS
    q_BHTD, k_BKSD, v_BKSE = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKE))
    out_BHTE = functional.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSE, attn_mask=mask_B1TS, scale=scale, enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1]
    )
    return out_BHTE.transpose(1, 2)


def accumulate_attention(
    before: OnlineSoftmax | None,
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    mask: AttentionMask,
    scale: float,
) -> OnlineSoftmax:
    """Attention to these keys and to all those of ``before``."""
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    by_kv_head = (B, K, H // K, T)
    q_XtD = q_BTHD.reshape(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B * K, -1, D)
    k_XDS = k_BSKD.permute(0, 2, 3, 1).flatten(0, 1)
    scores_BKGTS = product(q_XtD, k_XDS, computed("scores", q_BTHD.dtype)).view(*by_kv_head, -1) * scale
    scores_BKGTS = scores_BKGTS.masked_fill(~mask.visible()[:, None, None], MASKED_SCORE)
    max_BKGT = scores_BKGTS.detach().amax(dim=-1)
    if before is not None:
        max_BKGT = torch.maximum(before.max_BKGT, max_BKGT)
    probs_BKGTS = (scores_BKGTS - max_BKGT[..., None]).exp()
    normalizer_BKGT = probs_BKGTS.sum(dim=-1)
    probs_XtS = probs_BKGTS.to(kept("probabilities", v_BSKE.dtype)).view(B * K, -1, k_BSKD.shape[1])
    v_XSE = v_BSKE.transpose(1, 2).flatten(0, 1)
    sum_BKGTE = product(probs_XtS, v_XSE, computed("attention", v_BSKE.dtype)).view(*by_kv_head, -1)
    if before is not None:
        rescale_BKGT = (before.max_BKGT - max_BKGT).exp()
        normalizer_BKGT = before.normalizer_BKGT * rescale_BKGT + normalizer_BKGT
        sum_BKGTE = before.sum_BKGTE * rescale_BKGT[..., None] + sum_BKGTE
    return OnlineSoftmax(max_BKGT, normalizer_BKGT, sum_BKGTE)


def normalized(softmax: OnlineSoftmax, dtype: torch.dtype) -> torch.Tensor:
    """The output of attention over all keys so far, BTHE. ``dtype``: that of the computation."""
    out_BKGTE = softmax.sum_BKGTE / softmax.normalizer_BKGT[..., None]
    return out_BKGTE.permute(0, 3, 1, 2, 4).flatten(2, 3).to(kept("attention", dtype))
