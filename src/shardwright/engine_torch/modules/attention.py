"""Attention of a rank's heads, in high precision."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules.parts.arguments import refuse
from shardwright.engine_torch.modules.parts.tensor_parallel import require_one_dim

WINDOWS = {"causal": (None, (-1, -1), (-1, 0)), "no_mask": (None, (-1, -1))}
"""By mask, the windows that leave all tokens that it leaves."""


class DotProductAttention(nn.Module):
    """``softmax(q k^T * softmax_scale) v`` for the heads of a rank; tp shards heads. It has no parameters and sends nothing.

    Queries, keys and values are ``[length, batch, heads, channels]`` (``sbhd``) or ``[batch, length, heads, channels]`` (``bshd``);
    keys and values have ``num_gqa_groups`` heads. The output has the heads and channels of the queries as one last dim.

    >>> q = torch.ones(1, 3, 4, 2)
    >>> DotProductAttention(4, 2, qkv_format="bshd")(q, q, q).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | Sequence[int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        qkv_format: Literal["sbhd", "bshd"] = "sbhd",
        attn_mask_type: Literal["causal", "no_mask"] = "causal",
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        recipe: object = None,
        **others: Any,
    ) -> None:
        refuse("DotProductAttention", others, list(signature(DotProductAttention.__init__).parameters))
        for what, given, known in (
            ("qkv_format", qkv_format, ("sbhd", "bshd")),
            ("attn_mask_type", attn_mask_type, ("causal", "no_mask")),
            ("attention_dropout", attention_dropout, (0.0,)),
            ("recipe", recipe, (None,)),
            ("window_size", window_size, WINDOWS.get(attn_mask_type, (None,))),
        ):
            if given not in known:
                raise InputError(
                    f"DotProductAttention: {what} is {given!r}; it must be {' or '.join(map(repr, known))}."
                )
        super().__init__()
        # Sequence parallelism is over before attention: column-parallel layers have gathered the tokens.
        self.sequence_parallel = sequence_parallel
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.channels = (kv_channels,) * 2 if isinstance(kv_channels, int) else tuple(kv_channels)
        self.qkv_format, self.causal, self.softmax_scale = qkv_format, attn_mask_type == "causal", softmax_scale
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        if tp_mesh is not None:
            self.set_device_mesh(tp_mesh)
        self._require_heads()

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """The ranks that shard heads. ``weight_mesh`` is accepted as other modules have it, and not used."""
        del weight_mesh
        if tp_mesh is None:
            return
        size = require_one_dim(tp_mesh, "DotProductAttention: tp_mesh").size()
        if self.tp_size not in (1, size):
            raise InputError(f"DotProductAttention has tp_size={self.tp_size}, and tp_mesh has {size} ranks.")
        self.tp_size = size
        self._require_heads()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """There are none."""
        del defer_init

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.num_attention_heads // self.tp_size, self.num_gqa_groups // self.tp_size
        for what, one, num, channels in (
            ("query", query, heads, self.channels[0]),
            ("key", key, kv_heads, self.channels[0]),
            ("value", value, kv_heads, self.channels[1]),
        ):
            if one.dim() != 4 or tuple(one.shape[2:]) != (num, channels):
                raise InputError(
                    f"DotProductAttention: {what} is {tuple(one.shape)}; it must be {', '.join(self.qkv_format)} with {num} heads "
                    f"of {channels}, those of a rank of tp {self.tp_size}."
                )
        q, k, v = (self._heads_first(one) for one in (query, key, value))
        made = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.softmax_scale, enable_gqa=heads != kv_heads
        )
        return (made.permute(2, 0, 1, 3) if self.qkv_format == "sbhd" else made.transpose(1, 2)).flatten(2)

    def _heads_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 2, 0, 3) if self.qkv_format == "sbhd" else x.transpose(1, 2)

    def _require_heads(self) -> None:
        for what, num in (("num_attention_heads", self.num_attention_heads), ("num_gqa_groups", self.num_gqa_groups)):
            if num < 1 or num % self.tp_size:
                raise InputError(
                    f"DotProductAttention: {what}={num}, and tp {self.tp_size} does not divide it. Take a multiple of "
                    f"{self.tp_size}, or fewer tp ranks."
                )
        if self.num_attention_heads % self.num_gqa_groups:
            raise InputError(
                f"DotProductAttention: num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_gqa_groups={self.num_gqa_groups}."
            )
