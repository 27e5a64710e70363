"""Attention, layers and rotary embeddings take what Transformer Engine's take, in its order and with its defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shardwright.engine_torch.modules import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from shardwright.engine_torch.modules.parts.signatures import CALLS, CONSTRUCTORS, REQUIRED, arguments

OF_CALLS: Mapping[str, str] = {
    "DotProductAttention": CALLS["DotProductAttention"],
    "MultiheadAttention": (
        "hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None, "
        "bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False, "
        "inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias', core_attention_bias=None,"
        " alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, "
        "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, "
        "pad_between_seqs=None"
    ),
    "TransformerLayer": (
        "hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None, "
        "bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, "
        "enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None, "
        "checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None, "
        "core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, "
        "cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, "
        "max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None"
    ),
    "RotaryPositionEmbedding": ("max_seq_len, offset=0"),
}
OF_CONSTRUCTORS: Mapping[str, str] = {
    "DotProductAttention": CONSTRUCTORS["DotProductAttention"],
    "MultiheadAttention": (
        "hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-05, "
        "init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type='causal', "
        "window_size=None, bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, "
        "fuse_wgrad_accumulation=False, get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, "
        "return_bias=False, return_layernorm_output=False, input_layernorm=False, attention_type='self', "
        "set_parallel_mode=False, fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, "
        "rotary_pos_interleaved=False, ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, "
        "ub_bulk_dgrad=False, ub_bulk_wgrad=False, bias=True, normalization='LayerNorm', device=None, "
        "qkv_format='sbhd', name=None, qk_norm_type=None, qk_norm_eps=1e-06, qk_norm_before_rope=False, "
        "seq_length=None, micro_batch_size=None, softmax_type='vanilla'"
    ),
    "TransformerLayer": (
        "hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-05, "
        "hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, "
        "layer_number=None, kv_channels=None, self_attn_mask_type='causal', window_size=None, "
        "bottom_right_diagonal=None, enc_dec_attn_mask_type='no_mask', enc_dec_bottom_right_diagonal=None, "
        "enc_dec_window_size=None, tp_group=None, tp_size=1, params_dtype=None, get_rng_state_tracker=None, "
        "fuse_wgrad_accumulation=False, seq_length=None, micro_batch_size=None, sequence_parallel=False, "
        "apply_residual_connection_post_layernorm=False, output_layernorm=False, parallel_attention_mlp=False, "
        "layer_type='encoder', drop_path_rate=0.0, set_parallel_mode=False, fuse_qkv_params=False, "
        "rotary_pos_interleaved=False, zero_centered_gamma=False, qkv_weight_interleaved=True, "
        "ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=False, "
        "ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation='gelu', activation_params=None, "
        "normalization='LayerNorm', device=None, attn_input_format='sbhd', name=None, qk_norm_type=None, "
        "qk_norm_eps=1e-06, qk_norm_before_rope=False, softmax_type='vanilla'"
    ),
    "RotaryPositionEmbedding": (
        "dim, rotary_percent=1.0, seq_len_interpolation_factor=None, pretrained_max_position_embeddings=None, "
        "rotary_base=10000.0, interleaved=False"
    ),
}
"""Of release 2.20; the default device is PyTorch's."""
MODULES: Mapping[str, Any] = {
    module.__name__: module
    for module in (DotProductAttention, MultiheadAttention, TransformerLayer, RotaryPositionEmbedding)
}


@pytest.mark.parametrize("name", MODULES)
def test_constructor_and_call_have_its_order_and_defaults(name: str) -> None:
    module = MODULES[name]
    sides: list[tuple[Callable[..., Any], str]] = [
        (module.__init__, OF_CONSTRUCTORS[name]),
        (module.forward, OF_CALLS[name]),
    ]
    for function, text in sides:
        ours = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"]
        by_position = {
            parameter.name: parameter.default
            for parameter in ours
            if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        }
        needed = dict(arguments(text).items())
        assert list(by_position) == list(needed)
        for argument, default in needed.items():
            # Queries, keys and values are needed here: they are not taken from one packed tensor.
            if default is not REQUIRED and argument not in ("query_layer", "key_layer", "value_layer", "device"):
                assert by_position[argument] == default, argument
