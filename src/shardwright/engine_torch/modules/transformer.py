"""A layer of a transformer: attention, and a feed-forward layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules.attention.composed import ComposedModule, named
from shardwright.engine_torch.modules.attention.dot_product import Format, require_no_dropout
from shardwright.engine_torch.modules.attention.masks import MaskType, Window, mask_of
from shardwright.engine_torch.modules.codes.initialization import PrimaryWeights
from shardwright.engine_torch.modules.multihead import MultiheadAttention, Rotary
from shardwright.engine_torch.modules.norm import LayerNorm, Normalization, RMSNorm
from shardwright.engine_torch.modules.normed import LayerNormMLP
from shardwright.engine_torch.modules.parts.arguments import refuse
from shardwright.engine_torch.modules.parts.initial import InitMethod


class TransformerLayer(ComposedModule):
    """``x + attention(x)``, then ``x + mlp(x)``, each after a norm of its own; a ``decoder`` also attends to ``encoder_output`` between them.

    ``parallel_attention_mlp``: ``x + attention(x) + mlp(x)``. ``output_layernorm``: a norm of the output instead of the one before
    attention. ``apply_residual_connection_post_layernorm``: each output is added to what its norm gives in place of ``x``, where it has one.
    ``set_parallel_mode``: tp shards heads and hidden units; otherwise all is replicated.

    >>> TransformerLayer(8, 16, 2, hidden_dropout=0.0, attention_dropout=0.0)(torch.ones(3, 1, 8)).shape
    torch.Size([3, 1, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: MaskType = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Window | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: Normalization = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: Format = "sbhd",
        name: str | None = None,
        qk_norm_type: Literal["L2Normalization", "RMSNorm", "LayerNorm"] | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        amax_group: dist.ProcessGroup | None = None,
        recipe: object = None,
        primary_weights: PrimaryWeights | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        # They say how ub_tp_comm_overlap overlaps, which is refused.
        del ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
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
                "get_rng_state_tracker": get_rng_state_tracker,
                "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
                "drop_path_rate": drop_path_rate,
                "ub_tp_comm_overlap": ub_tp_comm_overlap,
                "softmax_type": softmax_type,
            },
        )
        require_no_dropout(label, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
        if layer_type not in ("encoder", "decoder"):
            raise InputError(f"{label}: layer_type is {layer_type!r}; it must be 'encoder' or 'decoder'.")
        others = {
            "layer_type='decoder'": layer_type == "decoder",
            "output_layernorm=True": output_layernorm,
            "apply_residual_connection_post_layernorm=True": apply_residual_connection_post_layernorm,
        }
        other = next((name for name, is_on in others.items() if is_on), None)
        if parallel_attention_mlp and other is not None:
            raise InputError(f"{label}: parallel_attention_mlp=True and {other} exclude each other. Leave one out.")
        mask_of(enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal, f"{label}: enc_dec")
        self.layer_type, self.parallel_attention_mlp = layer_type, parallel_attention_mlp
        common: dict[str, Any] = {
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
            "set_parallel_mode": set_parallel_mode,
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "amax_group": amax_group,
            "recipe": recipe,
            "primary_weights": primary_weights,
            "preserve_high_precision_init_val": preserve_high_precision_init_val,
        }
        attention: dict[str, Any] = {
            "kv_channels": kv_channels,
            "num_gqa_groups": num_gqa_groups,
            "attention_dropout": 0.0,
            "layernorm_epsilon": layernorm_epsilon,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            **common,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            name=named(name, "self_attention"),
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                attention_type="cross",
                name=named(name, "inter_attention"),
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            name=named(name, "layernorm_mlp"),
            **({} if activation_params is None else {"activation_params": activation_params}),
            **common,
        )
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size,
                eps=layernorm_epsilon,
                sequence_parallel=sequence_parallel,
                zero_centered_gamma=zero_centered_gamma,
                tp_size=tp_size,
                params_dtype=params_dtype,
                device=device,
                name=named(name, "layernorm"),
            )
        self.place(tp_group, tp_mesh, weight_mesh)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        self_attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        enc_dec_attn_mask_type: MaskType | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """``cu_seqlens_q`` parts the tokens of the layer, ``cu_seqlens_kv`` those of ``encoder_output``."""
        del is_first_microbatch
        if (encoder_output is None) != (self.layer_type == "encoder"):
            said = "is needed" if encoder_output is None else "has no place"
            raise InputError(f"{self.label}: layer_type is '{self.layer_type}', and encoder_output {said}.")
        common: dict[str, Any] = {
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_q,
            **common,
        )
        if self.parallel_attention_mlp:
            return hidden_states + attended + self.layernorm_mlp(hidden_states)
        hidden_states = _added(hidden_states, attended)
        if self.layer_type == "decoder":
            attended = self.inter_attention(
                hidden_states,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_kv=max_seqlen_kv,
                **common,
            )
            hidden_states = _added(hidden_states, attended)
        hidden_states = _added(hidden_states, self.layernorm_mlp(hidden_states))
        return self.layernorm(hidden_states) if hasattr(self, "layernorm") else hidden_states


def _added(residual: torch.Tensor, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of a part's output and its input, or of what its norm gives, where it returns that too."""
    return residual + output if isinstance(output, torch.Tensor) else output[1] + output[0]
