"""The contents of MaxText's own files, ``models/NAME.yml``, for the models that have a table of ours: the keys that set weights.

Taken from MaxText of August 2026 (AI-Hypercomputer/maxtext e591f30cb), for imports without such a file: MaxText always has it,
and reads it after every other file.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.interop.maxtext.reading.model_vocabulary import CHOICES, DIMS, PLAIN

Value = str | int | float | bool

MODEL_OF_BASE: Mapping[str, Value] = {
    "decoder_block": "llama2",
    "base_num_decoder_layers": 16,
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 7168,
    "vocab_size": 32_000,
}
"""The model that ``base.yml``, and every complete file based on it, sets where none is named."""

BASE: Mapping[str, Value] = {
    **{key: value for key, value in DIMS.items() if value is not None},
    **{key: value for key, (_, value) in CHOICES.items()},
    **{key: value for key, (_, value, _) in PLAIN.items()},
    **MODEL_OF_BASE,
}
"""The same, with its other keys on weights."""


def _dense(layers: int, embed: int, heads: int, mlp: int, *, vocab: int = 128_256) -> dict[str, Value]:
    return {
        "decoder_block": "llama2",
        "base_num_decoder_layers": layers,
        "base_emb_dim": embed,
        "base_num_query_heads": heads,
        "base_num_kv_heads": 8,
        "head_dim": 128,
        "base_mlp_dim": mlp,
        "mlp_activations": "silu, linear",
        "vocab_size": vocab,
        "logits_via_embedding": False,
    }


_8B = _dense(32, 4096, 32, 14_336)
_70B = _dense(80, 8192, 64, 28_672)
_405B = _dense(126, 16_384, 128, 53_248)
_LATENT: dict[str, Value] = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mlp_activations": "silu, linear",
    "logits_via_embedding": False,
}

FILES: Mapping[str, Mapping[str, Value]] = {
    "llama3-8b": _8B,
    "llama3-70b": _70B,
    "llama3-405b": _405B,
    "llama3.1-8b": _8B,
    "llama3.1-70b": _70B,
    "llama3.1-405b": _405B,
    "llama3.3-70b": _70B,
    "mixtral-8x7b": {
        **_dense(32, 4096, 32, 14_336, vocab=32_000),
        "decoder_block": "mixtral",
        "base_moe_mlp_dim": 14_336,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek2-16b": {
        **_LATENT,
        "base_num_decoder_layers": 27,
        "first_num_dense_layers": 1,
        "base_emb_dim": 2048,
        "base_num_query_heads": 16,
        "base_num_kv_heads": 16,
        "q_lora_rank": 0,
        "base_mlp_dim": 10_944,
        "base_moe_mlp_dim": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "shared_experts": 2,
        "routed_score_func": "softmax",
        "routed_bias": False,
        "vocab_size": 102_400,
    },
    "deepseek3-671b": {
        **_LATENT,
        "base_num_decoder_layers": 61,
        "first_num_dense_layers": 3,
        "base_emb_dim": 7168,
        "base_num_query_heads": 128,
        "base_num_kv_heads": 128,
        "q_lora_rank": 1536,
        "base_mlp_dim": 18_432,
        "base_moe_mlp_dim": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "vocab_size": 129_280,
    },
}
"""By ``model_name``, as in ``vocabulary.MODELS``."""


def is_deliberate(key: str, value: Value, settings: Mapping[str, object]) -> bool:
    """Whether a value next to a named model was set on purpose. ``settings``: the keys of all files.

    The values of a complete ``base.yml`` were not: any model's are meant to replace them.
    """
    return value != BASE.get(key) or not all(each in settings for each in MODEL_OF_BASE)
