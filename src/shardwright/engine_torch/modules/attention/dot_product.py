"""Attention of a rank's heads, in high precision.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.attention.scores import attend
from shardwright.engine_torch.modules.attention.arguments import FORMATS, refuse_in_call, sequences_of
from shardwright.engine_torch.modules.attention.context import (
    Context,
    added,
    attend_in_context,
    context_of,
)
from shardwright.engine_torch.modules.attention.masks import ALL, CAUSAL, Mask, MaskType, Window, mask_of
from shardwright.engine_torch.modules.attention.tokens import Sequences, attention_mask_of
from shardwright.engine_torch.modules.parts.arguments import multiples_near, refuse, require_local, require_positive
from shardwright.engine_torch.modules.parts.tensor_parallel import mesh_of, require_one_dim

Format = Literal["sbhd", "bshd", "thd"]


class DotProductAttention(nn.Module):
    """``softmax(q k^T * softmax_scale) v`` for the heads of a rank; tp shards heads, and context parallelism tokens. It has no parameters.

    Queries, keys and values are ``[length, batch, heads, channels]`` (``sbhd``), ``[batch, length, heads, channels]`` (``bshd``) or
    ``[tokens, heads, channels]`` (``thd``, of sequences that ``cu_seqlens_q`` and ``cu_seqlens_kv`` part); keys and values have
    ``num_gqa_groups`` heads. The output has the heads and channels as one last dim, and zeros for a query that attends to no key.

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
        qkv_format: Format = "sbhd",
        attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: Literal["self", "cross"] = "self",
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        amax_group: dist.ProcessGroup | None = None,
        recipe: None = None,
    ) -> None:
        del layer_number, amax_group  # Nothing here depends on the layer, and nothing is quantized.
        super().__init__()
        self.label = "DotProductAttention" + (f" '{name}'" if name else "")
        refuse(
            self.label,
            {
                "get_rng_state_tracker": get_rng_state_tracker,
                "softmax_type": softmax_type,
                "return_max_logit": return_max_logit,
            },
        )
        require_no_dropout(self.label, attention_dropout=attention_dropout)
        if recipe is not None:
            raise InputError(f"{self.label} computes in the dtype of its queries, without a recipe. Leave recipe out.")
        for argument, value, allowed in (
            ("qkv_format", qkv_format, tuple(FORMATS)),
            ("attention_type", attention_type, ("self", "cross")),
        ):
            if value not in allowed:
                raise InputError(
                    f"{self.label}: {argument} is {value!r}; it must be {' or '.join(map(repr, allowed))}."
                )
        # Sequence parallelism is over before attention: column-parallel layers have gathered the tokens.
        self.sequence_parallel = sequence_parallel
        self.num_attention_heads = require_positive(self.label, "num_attention_heads", num_attention_heads)
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        require_positive(self.label, "num_gqa_groups", self.num_gqa_groups)
        channels_of: Sequence[Any] = kv_channels if isinstance(kv_channels, list | tuple) else (kv_channels,) * 2
        if len(channels_of) != 2:
            raise InputError(
                f"{self.label}: kv_channels is {kv_channels!r}; it must be a whole number, or two: of keys and of values."
            )
        self.channels = tuple(require_positive(self.label, "kv_channels", channels) for channels in channels_of)
        self.softmax_scale = self.channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.qkv_format: Format = qkv_format
        self.attn_mask_type: MaskType = attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        mask_of(attn_mask_type, window_size, bottom_right_diagonal, self.label)
        self.context: Context | None = None
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self._require_heads(self.tp_size)
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh, weight_mesh)
        if cp_group is not None:
            self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_device_mesh(
        self,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        *,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        """The ranks that shard heads. The other arguments are accepted as other modules have them, and not used."""
        del weight_mesh, amax_group
        if tp_mesh is None:
            return
        size = require_one_dim(tp_mesh, f"{self.label}: tp_mesh").size()
        if self.tp_size not in (1, size):
            raise InputError(f"{self.label} has tp_size={self.tp_size}, and tp_mesh has {size} ranks.")
        self._require_heads(size)
        self.tp_size = size

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """As ``set_device_mesh``, of a group."""
        if tp_group is not None:
            self.set_device_mesh(mesh_of(tp_group, self.tp_size, torch.device("meta"), self.label))

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """The ranks that shard the tokens of each sequence, each two chunks of it. None: this rank has all tokens.

        ``cp_global_ranks``: those of the group, which are checked. ``cp_stream`` is not used: a rank waits for what it receives.
        """
        del cp_stream
        context = context_of(cp_group, cp_global_ranks, cp_comm_type, self.label)
        if context is not None and context.communication == "a2a":
            self._require_heads(self.tp_size * context.peers.size, f"tp {self.tp_size} x a2a {context.peers.size}")
        self.context = context

    def reset_parameters(self, defer_init: bool = False) -> None:
        """There are none."""
        del defer_init

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: Format | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: None = None,
        alibi_slopes: None = None,
        fast_zero_fill: bool = True,
        inference_params: None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: None = None,
        score_mod_bprop: None = None,
        score_mod_tensors: None = None,
        score_mod_bprop_tensors: None = None,
        qkv_layer: None = None,
        kv_layer: None = None,
        qkv_interleave_dim: int = -3,
        **others: Any,
    ) -> torch.Tensor:
        """``attention_mask``: True is masked out. The largest lengths are not needed, and neither are ``fast_zero_fill`` and
        ``pad_between_seqs``: padding has zeros, and is where ``cu_seqlens_q_padded`` says it."""
        del max_seqlen_q, max_seqlen_kv, fast_zero_fill
        refuse_in_call(
            self.label,
            {
                "core_attention_bias_type": core_attention_bias_type,
                "core_attention_bias": core_attention_bias,
                "alibi_slopes": alibi_slopes,
                "inference_params": inference_params,
                "fp8_output": fp8_output,
                "bf16_backward": bf16_backward,
                "num_splits": num_splits,
                "score_mod": score_mod,
                "score_mod_bprop": score_mod_bprop,
                "score_mod_tensors": score_mod_tensors,
                "score_mod_bprop_tensors": score_mod_bprop_tensors,
                "qkv_layer": qkv_layer,
                "kv_layer": kv_layer,
                "qkv_interleave_dim": qkv_interleave_dim,
                **others,
            },
        )
        layout = self.qkv_format if qkv_format is None else qkv_format
        self._require_shapes(layout, query_layer, key_layer, value_layer)
        if attn_mask_type is None:
            attn_mask_type = self.attn_mask_type
            # That of another mask may not be one of this.
            bottom_right_diagonal = (
                self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
            )
        window_size = self.window_size if window_size is None else window_size
        mask = mask_of(attn_mask_type, window_size, bottom_right_diagonal, self.label)
        q, k, v = (FORMATS[layout].to_rows(x) for x in (query_layer, key_layer, value_layer))
        lengths: Mapping[str, torch.Tensor | None] = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        }
        num = self.context.peers.size if self.context is not None else 1
        queries, keys = sequences_of(layout, (q, k), mask, attention_mask, lengths, num, self.label, pad_between_seqs)
        arbitrary = attention_mask if mask.kind == "arbitrary" and isinstance(attention_mask, torch.Tensor) else None
        run = (q, k, v, queries, keys, mask, arbitrary)
        if checkpoint_core_attention:
            out = checkpoint(self._attend, *run, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._attend(*run)
        assert isinstance(out, torch.Tensor)
        return FORMATS[layout].from_rows(out.flatten(2))

    def _attend(
        self,
        q_BTHD: torch.Tensor,
        k_BSKD: torch.Tensor,
        v_BSKE: torch.Tensor,
        queries: Sequences,
        keys: Sequences,
        mask: Mask,
        arbitrary: torch.Tensor | None,
    ) -> torch.Tensor:
        def on_one_rank(
            q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKE: torch.Tensor, queries: Sequences, keys: Sequences
        ) -> torch.Tensor:
            return _on_one_rank(q_BTHD, k_BSKD, v_BSKE, queries, keys, mask, arbitrary, self.softmax_scale)

        if self.context is None:
            return on_one_rank(q_BTHD, k_BSKD, v_BSKE, queries, keys)
        return attend_in_context(
            q_BTHD, k_BSKD, v_BSKE, queries, keys, mask, self.softmax_scale, self.context, on_one_rank
        )

    def _require_shapes(self, layout: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if layout not in FORMATS:
            raise InputError(f"{self.label}: qkv_format is {layout!r}; it must be {' or '.join(map(repr, FORMATS))}.")
        heads, kv_heads = self.num_attention_heads // self.tp_size, self.num_gqa_groups // self.tp_size
        for argument, x, num, channels in (
            ("query_layer", query, heads, self.channels[0]),
            ("key_layer", key, kv_heads, self.channels[0]),
            ("value_layer", value, kv_heads, self.channels[1]),
        ):
            require_local(x, f"{self.label}: {argument}")
            if x.dim() != len(layout) or tuple(x.shape[-2:]) != (num, channels):
                raise InputError(
                    f"{self.label}: {argument} is {tuple(x.shape)}; it must be {', '.join(layout)} with {num} heads "
                    f"of {channels}, those of a rank of tp {self.tp_size}."
                )
            if x.dtype != query.dtype:
                raise InputError(
                    f"{self.label}: {argument} is {x.dtype}, and query_layer {query.dtype}. Give all in one dtype."
                )
        if key.shape[:-2] != value.shape[:-2]:
            raise InputError(
                f"{self.label}: key_layer is {tuple(key.shape)} and value_layer {tuple(value.shape)}; they must have the same tokens."
            )

    def _require_heads(self, num: int, parts: str = "") -> None:
        of = parts or f"tp {num}"
        for argument, heads in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_gqa_groups", self.num_gqa_groups),
        ):
            if heads % num:
                raise InputError(
                    f"{self.label}: {argument}={heads}, and {of} does not divide it. Take {multiples_near(heads, num)}, or other ranks."
                )
        if self.num_attention_heads % self.num_gqa_groups:
            raise InputError(
                f"{self.label}: num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_gqa_groups={self.num_gqa_groups}. Take {multiples_near(self.num_attention_heads, self.num_gqa_groups)} heads."
            )


def require_no_dropout(label: str, **dropouts: object) -> None:
    """Raises InputError for a probability other than 0, which may be Transformer Engine's default."""
    wrong = {name: value for name, value in dropouts.items() if value != 0}
    if wrong:
        said = " and ".join(f"{name} is {value!r}" for name, value in wrong.items())
        fix = " and ".join(f"{name}=0.0" for name in wrong)
        raise InputError(
            f"{label}: {said}, and these modules have no dropout, which Transformer Engine's layers have by default. Give {fix}."
        )


def _on_one_rank(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    mask: Mask,
    arbitrary: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    square = queries.length == keys.length
    unpadded = not mask.has_padding and arbitrary is None
    if unpadded and mask.window in (ALL, CAUSAL) and (not mask.is_causal or square or not mask.bottom_right):
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKE))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=mask.is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)
    of_queries, of_keys = (sequences.on_rank(0, 1) for sequences in (queries, keys))
    visible = attention_mask_of(mask, (queries, of_queries), (keys, of_keys), 1)
    visible_BHTS = visible.visible()[:, None]
    if arbitrary is not None:
        visible_BHTS = visible_BHTS & ~arbitrary
    # A query without a key would have no softmax: it attends to all, and its output is zeros.
    blind_BHT1 = ~visible_BHTS.any(-1, keepdim=True)
    scores = added(visible_BHTS | blind_BHT1, q_BTHD.dtype)
    out = attend(q_BTHD, k_BSKD, v_BSKE, visible._replace(added_B1TS=scores), scale)
    return out.masked_fill(blind_BHT1.transpose(1, 2), 0.0)
