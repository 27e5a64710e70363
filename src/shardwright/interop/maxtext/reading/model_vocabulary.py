"""The keys that define a model in MaxText's files: decoders, dimensions, and options that change a decoder's weights.

Taken from MaxText of August 2026 (AI-Hypercomputer/maxtext e591f30cb). A key that is in no file has its value in ``base.yml``.
"""

from __future__ import annotations

from shardwright.interop.maxtext.reading.vocabulary import Kind

DECODERS = {"llama2": "llama3", "mistral": "llama3", "mixtral": "mixtral", "deepseek": "deepseek3"}
"""``decoder_block`` to our family whose layers have the same weights."""

OTHER_DECODERS = {
    "default": "a layer with parallel attention and feed-forward",
    "gemma": "gelu, norm scales stored as offsets from 1 and scaled embeddings",
    "gemma2": "norms after attention and feed-forward layers",
    "gemma3": "norms after attention and feed-forward layers, and norms of queries and keys",
    "gemma4": "norms after attention and feed-forward layers, and norms of queries, keys and values",
    "gemma4_small": "embeddings for each layer, and layers that share keys",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "norms of queries and keys",
    "qwen3_custom_moe": "norms of queries and keys, and experts of another width than the residual stream",
    "qwen3_next": "gated delta networks in place of attention",
    "qwen3_5": "gated delta networks in place of attention",
    "gpt3": "layer norms with biases, learned positions, and queries, keys and values in one weight",
    "gpt_oss": "biases, and attention sinks",
    "llama4": "shared experts with grouped queries, and layers without positions",
    "olmo3": "norms of queries and keys, and norms after attention and feed-forward layers",
    "deepseek4": "compressed attention, and several residual streams",
    "envy": "alternating layers with and without experts, and norms of queries and keys",
    "simple": "one product per layer",
    "simple_mlp": "no attention",
}
"""The other decoders, and what they have that our families lack."""

MODEL_NAMES: dict[str, tuple[str, ...]] = {
    "deepseek": (
        "deepseek-custom",
        "deepseek2-16b",
        "deepseek2-236b",
        "deepseek3-671b-2dfsdp",
        "deepseek3-671b-batchsplit",
        "deepseek3-671b",
        "deepseek3-test",
        "deepseek3-tiny",
        "deepseek3.2-671b",
        "kimi-k2-1t",
    ),
    "deepseek4": (
        "deepseek4-284b",
        "deepseek4-tiny",
    ),
    "envy": (
        "envy-switch-base",
        "envy-switch-large",
        "envy-switch-xxl",
        "envy-test",
    ),
    "gemma": (
        "gemma-2b",
        "gemma-7b",
    ),
    "gemma2": (
        "gemma2-27b",
        "gemma2-2b",
        "gemma2-9b",
    ),
    "gemma3": (
        "gemma3-12b",
        "gemma3-27b",
        "gemma3-4b",
    ),
    "gemma4": (
        "gemma4-26b",
        "gemma4-31b",
    ),
    "gemma4_small": (
        "gemma4-e2b",
        "gemma4-e4b",
    ),
    "gpt_oss": (
        "gpt-oss-120b",
        "gpt-oss-20b",
    ),
    "gpt3": (
        "gpt3-175b",
        "gpt3-22b",
        "gpt3-52k",
        "gpt3-6b",
    ),
    "llama2": (
        "llama2-13b",
        "llama2-70b",
        "llama2-7b",
        "llama3-405b",
        "llama3-70b",
        "llama3-8b",
        "llama3.1-405b",
        "llama3.1-70b",
        "llama3.1-8b",
        "llama3.3-70b",
    ),
    "llama4": (
        "llama4-17b-128e",
        "llama4-17b-16e",
    ),
    "mistral": ("mistral-7b",),
    "mixtral": (
        "mixtral-8x22b",
        "mixtral-8x7b",
    ),
    "olmo3": (
        "olmo3-32b",
        "olmo3-7b-pt",
        "olmo3-7b",
    ),
    "qwen2": (
        "qwen2.5-1.5b",
        "qwen2.5-14b",
        "qwen2.5-7b",
    ),
    "qwen3": (
        "qwen3-0.6b",
        "qwen3-1.7b-base",
        "qwen3-1.7b",
        "qwen3-14b-base",
        "qwen3-14b",
        "qwen3-32b",
        "qwen3-4b-base",
        "qwen3-4b-thinking-2507",
        "qwen3-4b",
        "qwen3-8b-base",
        "qwen3-8b",
        "qwen3-vl-2b",
        "qwen3-vl-4b",
    ),
    "qwen3_moe": (
        "qwen3-235b-a22b",
        "qwen3-30b-a3b-base",
        "qwen3-30b-a3b",
        "qwen3-480b-a35b",
        "qwen3-omni-30b-a3b",
        "qwen3-vl-30b-a3b",
    ),
    "qwen3_custom_moe": ("qwen3-custom-30b-a3b",),
    "qwen3_next": ("qwen3-next-80b-a3b",),
    "qwen3_5": (
        "qwen3.5-35b-a3b",
        "qwen3.5-397b-a17b",
    ),
}
"""The values of ``model_name``, by decoder. Each is a file of MaxText's, ``models/NAME.yml``, that MaxText merges automatically."""

INTEGER: Kind = "a whole number"
FLAG: Kind = "true or false"

DIMS: dict[str, int | None] = {
    "base_num_decoder_layers": None,
    "base_emb_dim": None,
    "base_num_query_heads": None,
    "base_num_kv_heads": None,
    "base_mlp_dim": None,
    "vocab_size": None,
    "head_dim": 128,
    "base_moe_mlp_dim": -1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "first_num_dense_layers": 0,
    "shared_experts": 0,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mtp_num_layers": 0,
}
"""Integers, with the default where no file sets them; None: a model must set it."""

CHOICES: dict[str, tuple[Kind, str | bool]] = {
    "decoder_block": ("text", ""),
    "attention_type": ("text", "global"),
    "logits_via_embedding": (FLAG, False),
    "routed_score_func": ("text", ""),
    "routed_bias": (FLAG, False),
    "norm_topk_prob": (FLAG, False),
}
"""Other keys that choose among the weights of a family."""

PLAIN: dict[str, tuple[Kind, str | int | bool, str]] = {
    "global_parameter_scale": (INTEGER, 1, "it multiplies the dimensions of the file"),
    "mlp_activations": ("a list", "silu, linear", "our feed-forward layers are SwiGLU"),
    "inhomogeneous_layer_cycle_interval": (INTEGER, 1, "alternating kinds of layers"),
    "fused_qkv": (FLAG, False, "queries, keys and values in one weight"),
    "fused_mlp": (FLAG, False, "gate and up in one weight"),
    "prefuse_moe_weights": (FLAG, False, "gate and up of the experts in one weight"),
    "attention_sink": (FLAG, False, "attention sinks"),
    "use_indexer": (FLAG, False, "an indexer, which selects the keys of attention"),
    "mhc_expansion_rate": (INTEGER, 1, "several residual streams"),
    "engram_layers": ("a list", "", "layers with tables of n-grams"),
    "trainable_position_size": (INTEGER, -1, "learned positions"),
    "moe_expert_input_dim": (INTEGER, -1, "experts of another width than the residual stream"),
    "padded_base_moe_mlp_dim": (INTEGER, -1, "padded experts"),
    "use_multimodal": (FLAG, False, "an image encoder"),
    "use_audio": (FLAG, False, "an audio encoder"),
    "lora.enable_lora": (FLAG, False, "adapters in addition to the weights"),
}
"""Keys that give a decoder of ours other weights than our family has: kind, the value at which they do not, and their effect."""

EXPERTS_ONLY: dict[str, str] = {"mlp_bias": "biases of the experts", "routed_bias": "a router bias"}
"""Flags that add weights and that only decoders with experts read; a DeepSeek router has its bias."""

READ_BY: dict[str, tuple[str, ...]] = {
    "llama3": ("head_dim",),
    "mixtral": ("head_dim", "base_moe_mlp_dim", "num_experts", "num_experts_per_tok"),
    "deepseek3": tuple(key for key in DIMS if key != "head_dim"),
}
"""The dimensions with a default that MaxText's decoders of a family read. All decoders read those without one."""

UNREAD: dict[str, tuple[Kind, int | bool | str, str]] = {
    "attention_bias": (FLAG, False, "biases of queries, keys and values"),
    "use_qk_norm": (FLAG, False, "norms of queries and keys"),
    "use_post_attn_norm": (FLAG, False, "norms after attention"),
    "use_post_ffw_norm": (FLAG, False, "norms after feed-forward layers"),
    "share_kv_projections": (FLAG, False, "keys and values from one weight"),
    "attention_output_dim": (INTEGER, -1, "attention of another width than the residual stream"),
    "global_head_dim": (INTEGER, 0, "heads of two sizes"),
    "global_num_kv_heads": (INTEGER, 0, "layers with other KV heads"),
    "num_kv_shared_layers": (INTEGER, 0, "layers that share keys and values"),
    "use_double_wide_mlp": (FLAG, False, "feed-forward layers of two widths"),
    "hidden_size_per_layer_input": (INTEGER, 0, "embeddings for each layer"),
    "vocab_size_per_layer_input": (INTEGER, 0, "embeddings for each layer"),
    "interleave_moe_layer_step": (INTEGER, 1, "alternating layers with and without experts"),
    "first_num_hash_layers": (INTEGER, 0, "layers that route by hash"),
    "o_lora_rank": (INTEGER, 0, "a low-rank attention output projection"),
    "o_groups": (INTEGER, 0, "a grouped attention output projection"),
}
"""Keys that add weights to other MaxText decoders and that ours do not read: kind, the value in ``base.yml``, and their effect."""

MODEL_KEYS: dict[str, Kind] = {
    **dict.fromkeys(DIMS, INTEGER),
    **{key: kind for key, (kind, _) in CHOICES.items()},
    **{key: kind for key, (kind, _, _) in PLAIN.items()},
    **{key: kind for key, (kind, _, _) in UNREAD.items()},
    "mlp_bias": FLAG,
}
