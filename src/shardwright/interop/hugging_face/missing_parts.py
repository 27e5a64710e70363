"""Model types that no table of ours computes, and what they have that our tables lack."""

from __future__ import annotations

from collections.abc import Mapping

_BIASES = "biases of queries, keys and values"
_NORMS_QK = "norms of queries and keys"
_LAYER_NORM = "norms that subtract the mean"
_LEARNED = "learned embeddings of positions"
_PLAIN_MLP = "feed-forward layers without a gate"
_PARALLEL = "attention and feed-forward layers side by side"
_GELU = "GELU in feed-forward layers"
_FOUR_NORMS = "norms after attention and feed-forward layers"
_SHARED_GATE = "a gate of the shared expert"
_SCALES = "factors of embeddings, residuals and logits"
_FUSED = "queries, keys and values in one tensor"
_PARTIAL = "positions on a part of each head"
_MIXED = "layers with different kinds of attention"
_WINDOW = "attention over a window"
_STATE = "layers of a state space"
_CAPS = "caps of scores and logits"
_EMBED_SCALE = "embeddings times the root of their width"
_VISION = "an encoder of images"
_ENCODER = "attention in both directions"
_SPARSE = "attention over keys that an index selects"

MISSING: Mapping[str, tuple[str, ...]] = {
    "apertus": (_NORMS_QK, _PLAIN_MLP),
    "baichuan": (_FUSED,),
    "bert": (_ENCODER, _LEARNED, _LAYER_NORM),
    "bloom": ("biases on scores by distance", _LAYER_NORM, _PLAIN_MLP),
    "chatglm": (_FUSED, _PARTIAL),
    "cohere": (_PARALLEL, _LAYER_NORM, _SCALES),
    "cohere2": (_PARALLEL, _LAYER_NORM, _SCALES, _MIXED),
    "dbrx": (_FUSED, _LAYER_NORM, "clipped queries, keys and values"),
    "deepseek_v32": (_SPARSE,),
    "deepseek_v4": (_SPARSE, "several residual streams"),
    "exaone4": (_NORMS_QK, _MIXED, _FOUR_NORMS),
    "falcon": (_PARALLEL, _LAYER_NORM, _PLAIN_MLP),
    "gemma": (_GELU, _EMBED_SCALE, "norms by one plus the weight"),
    "gemma2": (_GELU, _EMBED_SCALE, _FOUR_NORMS, _CAPS, _MIXED),
    "gemma3": (_VISION, _GELU, _EMBED_SCALE, _FOUR_NORMS, _NORMS_QK, _MIXED),
    "gemma3_text": (_GELU, _EMBED_SCALE, _FOUR_NORMS, _NORMS_QK, _MIXED),
    "glm": (_PARTIAL, _BIASES),
    "glm4": (_PARTIAL, _FOUR_NORMS),
    "glm4_moe": (_PARTIAL, _BIASES, "grouped queries with a shared expert"),
    "gpt2": (_LEARNED, _LAYER_NORM, _PLAIN_MLP, "biases"),
    "gpt_bigcode": (_LEARNED, _LAYER_NORM, _PLAIN_MLP, "biases"),
    "gpt_neox": (_PARALLEL, _PARTIAL, _LAYER_NORM, _PLAIN_MLP),
    "gpt_oss": ("sinks of attention", _MIXED, "biases", "a clamped gate of the experts"),
    "gptj": (_PARALLEL, _PARTIAL, _LAYER_NORM, _PLAIN_MLP),
    "granite": (_SCALES,),
    "granitemoe": (_SCALES, "experts' gates and ups in one tensor"),
    "internlm2": (_FUSED,),
    "jamba": (_STATE, _MIXED),
    "kimi_linear": ("linear attention", _MIXED),
    "kimi_k25": (_VISION,),
    "llama4": (_VISION, _MIXED, _NORMS_QK, "factors of the experts' inputs"),
    "llama4_text": (_MIXED, _NORMS_QK, "factors of the experts' inputs"),
    "mamba": (_STATE,),
    "mamba2": (_STATE,),
    "minimax": ("linear attention", _MIXED),
    "minimax_m2": (_NORMS_QK, _PARTIAL),
    "ministral": (_MIXED,),
    "mistral3": (_VISION,),
    "mpt": ("biases on scores by distance", _LAYER_NORM, _PLAIN_MLP),
    "nemotron": (_PLAIN_MLP, _PARTIAL, _LAYER_NORM),
    "olmo": ("norms without a weight",),
    "olmo2": (_NORMS_QK, _FOUR_NORMS),
    "olmo3": (_NORMS_QK, _FOUR_NORMS, _MIXED),
    "olmoe": (_NORMS_QK,),
    "opt": (_LEARNED, _LAYER_NORM, _PLAIN_MLP, "biases"),
    "phi": (_PARALLEL, _PARTIAL, _LAYER_NORM, _PLAIN_MLP),
    "phi3": (_FUSED, "gates and ups in one tensor", _WINDOW),
    "phimoe": (_LAYER_NORM, "a router with a margin", _WINDOW),
    "qwen": (_FUSED, _BIASES),
    "qwen2": (_BIASES,),
    "qwen2_moe": (_BIASES, _SHARED_GATE),
    "qwen2_vl": (_VISION, _BIASES),
    "qwen3": (_NORMS_QK,),
    "qwen3_moe": (_NORMS_QK,),
    "qwen3_next": ("linear attention", _MIXED, _NORMS_QK, _SHARED_GATE),
    "smollm3": ("layers without positions",),
    "stablelm": (_PARTIAL, _LAYER_NORM),
    "starcoder2": (_LAYER_NORM, _PLAIN_MLP, "biases", _WINDOW),
    "t5": (_ENCODER, "biases on scores by distance"),
}
"""By ``model_type``; the parts that would have to be added, the most visible first."""
