"""What attention and layers of a transformer refuse, in full."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.engine_torch.ranks import Ranks
from tests.engine_torch.refused_attention import ALONE, on_ranks
from tests.engine_torch.refused_modules import refusal

REFUSED: Mapping[str, str] = {
    "13 heads": (
        "DotProductAttention: num_attention_heads=13, and tp 2 does not divide it. Take 12 or 14, or other ranks."
    ),
    "13 heads of a layer": (
        "DotProductAttention 'self_attention.core_attention': num_attention_heads=13, and tp 2 does not divide it. "
        "Take 12 or 14, or other ranks."
    ),
    "channels": (
        "MultiheadAttention 'self_attention': hidden_size=100 is no multiple of num_attention_heads=13. Take 91 or "
        "104, or give kv_channels."
    ),
    "groups": ("DotProductAttention: num_attention_heads=6 is no multiple of num_gqa_groups=4. Take 4 or 8 heads."),
    "dropout": (
        "TransformerLayer: hidden_dropout is 0.1 and attention_dropout is 0.1, and these modules have no dropout, "
        "which Transformer Engine's layers have by default. Give hidden_dropout=0.0 and attention_dropout=0.0."
    ),
    "dropout of attention": (
        "MultiheadAttention: attention_dropout is 0.5, and these modules have no dropout, which Transformer Engine's "
        "layers have by default. Give attention_dropout=0.0."
    ),
    "sequence": (
        "MultiheadAttention: sequence_parallel=True needs set_parallel_mode=True: the column-parallel layers gather "
        "the tokens that attention needs."
    ),
    "mask": (
        "DotProductAttention: attn_mask_type is 'causal_top'; it must be one of no_mask, padding, causal, "
        "padding_causal, causal_bottom_right, padding_causal_bottom_right, arbitrary."
    ),
    "window": (
        "DotProductAttention: window_size is (3, -2); it must be two whole numbers: how many keys before a query it "
        "attends to, and how many after it; -1 is all."
    ),
    "causal window": (
        "DotProductAttention: window_size=(-1, 0) is a causal mask, and attn_mask_type is 'no_mask'. Give a causal "
        "one, or no window_size."
    ),
    "diagonal": (
        "DotProductAttention: bottom_right_diagonal=True, and 'causal' has False. Leave it out, or give "
        "attn_mask_type='causal_bottom_right'."
    ),
    "softmax": (
        "DotProductAttention: softmax_type='learnable' is Transformer Engine's, and is not done here. Only the "
        "ordinary softmax is computed."
    ),
    "residual": (
        "TransformerLayer: parallel_attention_mlp=True and apply_residual_connection_post_layernorm=True exclude each other. Leave one out."
    ),
    "excluding": (
        "TransformerLayer: parallel_attention_mlp=True and output_layernorm=True exclude each other. Leave one out."
    ),
    "overlap": (
        "TransformerLayer: ub_tp_comm_overlap=True is Transformer Engine's, and is not done here. Communication is "
        "not overlapped by the module."
    ),
    "encoder": ("TransformerLayer: layer_type is 'decoder', and encoder_output is needed."),
    "bias": (
        "DotProductAttention: core_attention_bias_type is 'alibi'; it is Transformer Engine's, and is not done here. "
        "Only masks change scores here."
    ),
    "cache": (
        "DotProductAttention: inference_params is 'cache'; it is Transformer Engine's, and is not done here. Keys of "
        "earlier calls are not kept: call the module with all tokens."
    ),
    "channels of no size": "DotProductAttention: kv_channels is 0; it must be a whole number from 1.",
    "three channels": "DotProductAttention: kv_channels is (2, 2, 2); it must be a whole number, or two: of keys and of values.",
    "channels in words": "DotProductAttention: kv_channels is '16'; it must be a whole number from 1.",
    "a list of lengths": ("DotProductAttention: cu_seqlens_q is a list; it must be a tensor, int32 [sequences + 1]."),
    "activation": (
        "activation is ['gelu']; it must be one of gelu, relu, silu, srelu, qgelu, glu, geglu, reglu, sreglu, qgeglu, swiglu, clamped_swiglu."
    ),
    "misspelt": ("DotProductAttention: a call has no argument 'qkv_layers'. Did you mean 'qkv_layer'?"),
    "heads": (
        "DotProductAttention: query_layer is (2, 6, 4, 2); it must be b, s, h, d with 2 heads of 2, those of a rank "
        "of tp 1."
    ),
    "packed and causal": (
        "DotProductAttention: attn_mask_type is 'causal', and qkv_format 'thd' needs one with 'padding': 'padding' or"
        " 'padding_causal'. Sequences of other lengths are padding to each other."
    ),
    "no lengths": (
        "DotProductAttention: attn_mask_type 'padding' needs cu_seqlens_q and cu_seqlens_kv, or in rows attention_mask."
    ),
    "unused mask": (
        "DotProductAttention: attention_mask is given, and attn_mask_type 'causal' does not use it. Leave it out, or "
        "give 'padding' or 'arbitrary'."
    ),
    "no mask": (
        "DotProductAttention: attn_mask_type 'arbitrary' needs attention_mask, a bool tensor: True is masked out."
    ),
    "shape of a mask": (
        "DotProductAttention: attention_mask is (2, 1, 6, 5); it must be (2, 4, 6, 6), or 1 in a dim: rows, heads of "
        "a rank, queries, keys."
    ),
    "shape of padding": (
        "DotProductAttention: attention_mask of queries is torch.bool (2, 6); it must be bool (2, 1, 1, 6), True "
        "where there is padding. Of queries and keys of other lengths give two."
    ),
    "long": ("DotProductAttention: cu_seqlens_q is [0, 7, 12]; it must have the lengths of 2 rows, each at most 6."),
    "descending": ("DotProductAttention: cu_seqlens_q is [0, 4, 2]; it must begin with 0 and not descend."),
    "places": (
        "DotProductAttention: cu_seqlens_q is [0, 5, 10], and cu_seqlens_q_padded [0, 4, 10]: a sequence has to fit "
        "into its place."
    ),
    "more tokens": ("DotProductAttention: cu_seqlens_q is [0, 13], and there are 12 tokens."),
    "odd rotation": (
        "RotaryPositionEmbedding: dim=6 and rotary_percent=0.5 rotate 3 elements, and pairs need an even number. Take"
        " 2 or 4."
    ),
    "angles": (
        "rotary_pos_emb has 4 positions, and the longest sequence 5 tokens on all ranks. Give "
        "RotaryPositionEmbedding(dim)(5), of entire sequences."
    ),
}
"""In one process."""

ON_RANKS: Mapping[str, str] = {
    "odd": (
        "DotProductAttention: query_layer has 3 tokens of each row, and a rank of context parallelism has two equal "
        "chunks of it. Pad rows to a multiple of 4 tokens on all 2 ranks together."
    ),
    "mask": (
        "DotProductAttention: attention_mask is of rows, and 2 ranks of context parallelism have parts of them. Give "
        "cu_seqlens_q and cu_seqlens_kv of entire rows, with a mask of 'padding'."
    ),
    "chunks": (
        "DotProductAttention: cu_seqlens_q is [0, 6, 12], and this rank has 6 tokens. Over 2 ranks of context "
        "parallelism each sequence must be padded to a multiple of 4, and a rank has 6 tokens."
    ),
    "two groups": (
        "DotProductAttention: cp_comm_type='a2a+p2p' over groups of 2 x 2 ranks is not done here. Give one group of "
        "all of them, and 'a2a', 'p2p' or 'all_gather'."
    ),
    "another way": ("DotProductAttention: cp_comm_type is 'ring'; it must be one of 'p2p', 'all_gather', 'a2a'."),
    "ranks": ("DotProductAttention: cp_global_ranks is [1, 0], and cp_group has [0, 2]. Give these, or None."),
    "group": (
        "DotProductAttention: cp_group is no process group that this rank is in. Give each rank the group that shares"
        " its sequences."
    ),
    "heads": (
        "DotProductAttention: num_attention_heads=3, and tp 1 x a2a 2 does not divide it. Take 2 or 4, or other ranks."
    ),
    "tp heads": (
        "DotProductAttention: num_attention_heads=6, and tp 2 x a2a 2 does not divide it. Take 4 or 8, or other ranks."
    ),
}
"""What rank 0 of tensor and context parallelism reads."""


@pytest.mark.parametrize("case", ALONE)
def test_what_is_not_computed_is_refused_by_name(case: str) -> None:
    assert refusal(ALONE[case]) == REFUSED[case]


def test_what_ranks_cannot_share_is_refused_on_each(four: Ranks) -> None:
    ranks = four.run(on_ranks)
    assert ranks[0] == ON_RANKS
    assert all(text for rank in ranks for text in rank.values())
