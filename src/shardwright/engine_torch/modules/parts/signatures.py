"""The arguments of Transformer Engine's constructors and calls, in order and with their defaults (2.20, NVIDIA/TransformerEngine d0067d0).

A constructor here takes the same: by position in that order, by name, and what has no meaning here at its default. ``device`` is by default
PyTorch's and not ``cuda``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules.parts.arguments import UNUSED, refuse

REQUIRED = inspect.Parameter.empty
_NORM = "normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False, hidden_size=None"

CONSTRUCTORS: Mapping[str, str] = {
    "Linear": "in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, "
    "get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None, "
    "parallel_mode=None, parameters_split=None, device='cuda', ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, "
    "ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, "
    "save_original_input=False, name=None",
    "LayerNormLinear": "in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, "
    "tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization='LayerNorm', return_bias=False, "
    "params_dtype=None, parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False, "
    "parameters_split=None, zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, ub_overlap_rs=False, "
    "ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None, delay_wgrad_compute=False, "
    "symmetric_ar_type=None, name=None",
    "LayerNormMLP": "hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False, get_rng_state_tracker=None, "
    "tp_group=None, tp_size=1, init_method=None, bias=True, normalization='LayerNorm', activation='gelu', activation_params=None, "
    "output_layer_init_method=None, fuse_wgrad_accumulation=False, params_dtype=None, return_layernorm_output=False, "
    "return_layernorm_output_gathered=False, seq_length=None, micro_batch_size=None, set_parallel_mode=False, "
    "zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, "
    "ub_bulk_dgrad=False, ub_bulk_wgrad=False, delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False",
    "GroupedLinear": "num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, "
    "tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None, "
    "parallel_mode=None, device='cuda', ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, "
    "save_original_input=False, single_grouped_weight=False, single_grouped_bias=False, name=None, use_grouped_tensor=None",
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "DotProductAttention": "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format='sbhd', "
    "attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1, "
    "get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type='self', cp_group=None, cp_global_ranks=None, "
    "cp_stream=None, cp_comm_type='p2p', softmax_scale=None, softmax_type='vanilla', return_max_logit=False, name=None",
}

CALLS: Mapping[str, str] = {
    "Linear": "inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False",
    "LayerNormLinear": "inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False",
    "LayerNormMLP": "inp, is_first_microbatch=None",
    "GroupedLinear": "inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None",
    "DotProductAttention": "query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None, cu_seqlens_q=None, "
    "cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, "
    "attn_mask_type=None, window_size=None, bottom_right_diagonal=None, checkpoint_core_attention=False, "
    "core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, "
    "pad_between_seqs=None, fp8_output=False, bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, "
    "score_mod_tensors=None, score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3",
}


def arguments(text: str) -> Mapping[str, Any]:
    """The names of a signature in order, with their defaults.

    >>> arguments("size, eps=1e-5")["eps"]
    1e-05
    """
    (function,) = ast.parse(f"def call({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    names, defaults = [argument.arg for argument in function.args.args], function.args.defaults
    values = [REQUIRED] * (len(names) - len(defaults)) + [ast.literal_eval(default) for default in defaults]
    return dict(zip(names, values, strict=True))


def as_in_transformer_engine(module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A constructor that takes its arguments as Transformer Engine's ``module`` does, and by name also what that one has not."""
    table = arguments(CONSTRUCTORS[module])

    def decorated(construct: Callable[..., None]) -> Callable[..., None]:
        @wraps(construct)
        def constructed(self: Any, *values: Any, **options: Any) -> None:
            label = type(self).__name__
            if len(values) > len(table):
                raise InputError(f"{label} takes {len(table)} arguments by position, and was given {len(values)}.")
            named = dict(zip(table, values, strict=False))
            twice = next((name for name in named if name in options), None)
            if twice is not None:
                raise InputError(f"{label}: '{twice}' is given by position and by name. Give it once.")
            named |= options
            missing = [name for name, default in table.items() if default is REQUIRED and name not in named]
            if missing:
                raise InputError(f"{label} needs {' and '.join(missing)}.")
            refuse(label, {name: named.pop(name) for name in list(named) if name in UNUSED and name in table})
            construct(self, **named)

        constructed.__signature__ = _signature(table, construct)  # pyright: ignore[reportAttributeAccessIssue]
        return constructed

    return decorated


def _signature(table: Mapping[str, Any], construct: Callable[..., None]) -> inspect.Signature:
    """Of a table, and what the constructor has besides it, by name only."""
    kind = inspect.Parameter
    besides = [
        parameter
        for parameter in inspect.signature(construct).parameters.values()
        if parameter.name not in (*table, "self")
    ]
    return inspect.Signature(
        [
            kind("self", kind.POSITIONAL_ONLY),
            *(
                kind(name, kind.POSITIONAL_OR_KEYWORD, default=None if name == "device" else default)
                for name, default in table.items()
            ),
            *(parameter.replace(kind=kind.KEYWORD_ONLY) for parameter in besides if parameter.kind != kind.VAR_KEYWORD),
            *(parameter for parameter in besides if parameter.kind == kind.VAR_KEYWORD),
        ]
    )
