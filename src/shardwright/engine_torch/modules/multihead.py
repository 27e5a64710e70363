"""Attention with the projections of queries, keys, values and output."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.modules.attention.composed import ComposedModule, named
from shardwright.engine_torch.modules.attention.dot_product import (
    DotProductAttention,
    Format,
    require_no_dropout,
)
from shardwright.engine_torch.modules.attention.masks import MaskType, Window
from shardwright.engine_torch.modules.attention.rotary import apply_rotary_pos_emb
from shardwright.engine_torch.modules.codes.initialization import PrimaryWeights
from shardwright.engine_torch.modules.linear import Linear
from shardwright.engine_torch.modules.norm import LayerNorm, Normalization, RMSNorm
from shardwright.engine_torch.modules.parts.arguments import multiples_near, refuse, require_positive
from shardwright.engine_torch.modules.parts.initial import InitMethod
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from shardwright.engine_torch.modules.projections import Projections

Rotary = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Angles of queries and keys, of both or of each."""


class MultiheadAttention(ComposedModule):
    """Queries, keys and values of the input, or of ``encoder_output``, attention, and the output's projection.

    The weights of queries, keys and values are apart whatever ``fuse_qkv_params`` says, so that tp shards each by its heads; with
    ``qkv_weight_interleaved`` it says how they lie in a checkpoint of Transformer Engine (``from_transformer_engine``).
    ``set_parallel_mode``: tp shards heads; otherwise all is replicated.

    >>> MultiheadAttention(8, 2, attention_dropout=0.0)(torch.ones(3, 1, 8)).shape
    torch.Size([3, 1, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: Format = "sbhd",
        name: str | None = None,
        qk_norm_type: Literal["L2Normalization", "RMSNorm", "LayerNorm"] | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        amax_group: dist.ProcessGroup | None = None,
        recipe: object = None,
        primary_weights: PrimaryWeights | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        # Nothing here depends on them: any number of tokens is accepted.
        del layer_number, seq_length, micro_batch_size
        super().__init__(
            name,
            set_parallel_mode=set_parallel_mode,
            sequence_parallel=sequence_parallel,
            tp_size=tp_size,
            device=device,
        )
        label = self.label
        refuse(
            label,
            {
                "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
                "get_rng_state_tracker": get_rng_state_tracker,
                "return_bias": return_bias,
                "ub_overlap_ag": ub_overlap_ag,
                "ub_overlap_rs": ub_overlap_rs,
                "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
                "ub_bulk_dgrad": ub_bulk_dgrad,
                "ub_bulk_wgrad": ub_bulk_wgrad,
                "softmax_type": softmax_type,
            },
        )
        require_no_dropout(label, attention_dropout=attention_dropout)
        if attention_type not in ("self", "cross"):
            raise InputError(f"{label}: attention_type is {attention_type!r}; it must be 'self' or 'cross'.")
        if qk_norm_type not in (None, "L2Normalization", "RMSNorm", "LayerNorm"):
            raise InputError(
                f"{label}: qk_norm_type is {qk_norm_type!r}; it must be 'L2Normalization', 'RMSNorm', 'LayerNorm' or None."
            )
        self.kv_channels = kv_channels or _channels(label, hidden_size, num_attention_heads)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.attention_type, self.qkv_format = attention_type, qkv_format
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_type, self.qk_norm_eps = qk_norm_type, qk_norm_eps
        self.qk_norm_before_rope = qk_norm_before_rope
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.kv_channels,
            num_gqa_groups,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            attention_type=attention_type,
            tp_size=tp_size if set_parallel_mode else 1,
            name=named(name, "core_attention"),
        )
        options: dict[str, Any] = {"tp_size": tp_size, "params_dtype": params_dtype, "device": device}
        products = {**options, "sequence_parallel": sequence_parallel, "amax_group": amax_group, "recipe": recipe}
        products["primary_weights"] = primary_weights
        products["preserve_high_precision_init_val"] = preserve_high_precision_init_val
        into: Mode | None = "column" if set_parallel_mode else None
        of_norm: dict[str, Any] = {}
        if input_layernorm:
            of_norm = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
            of_norm["eps"] = layernorm_epsilon
        of_input = {"bias": bias, "parallel_mode": into, "init_method": init_method, **products}
        groups = (self.num_gqa_groups if qkv_weight_interleaved else 1) if fuse_qkv_params else None
        q_features, kv_features = (num * self.kv_channels for num in (num_attention_heads, self.num_gqa_groups))
        kv_parts = {"key": kv_features, "value": kv_features}
        for child, parts in self._projections({"query": q_features}, kv_parts):
            normed = of_norm if child.startswith("layernorm") else {}
            options_of = {"name": named(name, child), "fused_groups": groups, **of_input, **normed}
            self.add_module(child, Projections(hidden_size, parts, **options_of))
        if attention_type == "cross" and not input_layernorm:
            self.query_layer = Linear(hidden_size, q_features, name=named(name, "query_layer"), **of_input)
        if qk_norm_type in ("RMSNorm", "LayerNorm"):
            norm = RMSNorm if qk_norm_type == "RMSNorm" else LayerNorm
            # A rank of tp has some of the heads, so its gradient is a part of the sum, as that of a part of the tokens.
            self.q_norm, self.k_norm = (
                norm(self.kv_channels, qk_norm_eps, set_parallel_mode, name=named(name, child), **options)
                for child in ("q_norm", "k_norm")
            )
        self.proj = Linear(
            q_features,
            hidden_size,
            bias=bias,
            parallel_mode="row" if set_parallel_mode else None,
            init_method=output_layer_init_method,
            name=named(name, "proj"),
            **products,
        )
        self.place(tp_group, tp_mesh, weight_mesh)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: None = None,
        alibi_slopes: None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The output; with ``return_layernorm_output``, and what the norm gives. ``rotary_pos_emb``: of entire sequences."""
        del is_first_microbatch
        (query, key, value), normed = self._projected(hidden_states, encoder_output)
        query, key, value = (x.unflatten(-1, (-1, self.kv_channels)) for x in (query, key, value))
        if self.qk_norm_before_rope:
            query, key = self._normed(query, "q_norm"), self._normed(key, "k_norm")
        if rotary_pos_emb is not None:
            of_query, of_key = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            bounds_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            bounds_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
            query, key = self._rotated(query, of_query, bounds_q), self._rotated(key, of_key, bounds_kv)
        if not self.qk_norm_before_rope:
            query, key = self._normed(query, "q_norm"), self._normed(key, "k_norm")
        attended = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            None,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            max_seqlen_q,
            max_seqlen_kv,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            checkpoint_core_attention,
            core_attention_bias_type,
            core_attention_bias,
            alibi_slopes,
            fast_zero_fill,
            inference_params,
            pad_between_seqs,
        )
        output = self.proj(attended)
        return (output, normed) if self.input_layernorm and self.return_layernorm_output else output

    def _projections(self, query: dict[str, int], kv: dict[str, int]) -> list[tuple[str, dict[str, int]]]:
        """The children that project, by Transformer Engine's names, and the parts of each."""
        if self.attention_type == "self":
            return [("layernorm_qkv" if self.input_layernorm else "qkv", {**query, **kv})]
        return [*([("layernorm_query", query)] if self.input_layernorm else []), ("key_value", kv)]

    def _projected(
        self, hidden: torch.Tensor, encoder_output: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Queries, keys and values, and the input after the norm."""
        if (encoder_output is None) != (self.attention_type == "self"):
            said = "is needed" if encoder_output is None else "has no place"
            raise InputError(f"{self.label}: attention_type is '{self.attention_type}', and encoder_output {said}.")
        if self.attention_type == "self":
            return self.get_submodule("layernorm_qkv" if self.input_layernorm else "qkv")(hidden)
        if self.input_layernorm:
            queries, normed = self.get_submodule("layernorm_query")(hidden)
        else:
            queries, normed = [self.query_layer(hidden)], hidden
        return [*queries, *self.get_submodule("key_value")(encoder_output)[0]], normed

    def _normed(self, x: torch.Tensor, norm: str) -> torch.Tensor:
        if self.qk_norm_type is None:
            return x
        if self.qk_norm_type != "L2Normalization":
            return self.get_submodule(norm)(x)
        wide = x.to(computed("norm", x.dtype))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.qk_norm_eps)).to(x.dtype)

    def _rotated(self, x: torch.Tensor, angles: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
        context = self.core_attention.context
        size, index = (context.peers.size, context.peers.index) if context is not None else (1, 0)
        return apply_rotary_pos_emb(
            x,
            angles,
            self.qkv_format,
            interleaved=self.rotary_pos_interleaved,
            cu_seqlens=bounds,
            cp_size=size,
            cp_rank=index,
        )


def _channels(label: str, hidden_size: int, num_heads: int) -> int:
    require_positive(label, "num_attention_heads", num_heads)
    if hidden_size % num_heads:
        raise InputError(
            f"{label}: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}. Take "
            f"{multiples_near(hidden_size, num_heads)}, or give kv_channels."
        )
    return hidden_size // num_heads
