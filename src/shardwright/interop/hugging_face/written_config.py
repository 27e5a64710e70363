"""The ``config.json`` of an architecture: the inverse of ``config.py``, for models that were not published.

It is written with the keys of published configs, which every version of transformers reads. What an architecture does not say, such as
the ids of special tokens, is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.core.model.architecture import PREFIX

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

COMMON = {
    "hidden_size": "embed",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "initializer_stddev",
    "rope_theta": "rope.theta",
    "num_attention_heads": "attention.heads",
}
GROUPED = {"num_key_value_heads": "attention.kv_heads", "head_dim": "attention.head_dim"}
OF_TYPE: Mapping[str, Mapping[str, str]] = {
    "llama": {**COMMON, **GROUPED, "intermediate_size": "mlp"},
    "mistral": {**COMMON, **GROUPED, "intermediate_size": "mlp"},
    "mixtral": {
        **COMMON,
        **GROUPED,
        "intermediate_size": "experts.width",
        "num_local_experts": "experts.num",
        "num_experts_per_tok": "experts.top_k",
    },
    "deepseek_v3": {
        **COMMON,
        "num_key_value_heads": "attention.heads",
        "q_lora_rank": "attention.q_lora",
        "kv_lora_rank": "attention.kv_lora",
        "qk_nope_head_dim": "attention.nope_dim",
        "qk_rope_head_dim": "attention.rope_dim",
        "v_head_dim": "attention.value_dim",
        "intermediate_size": "mlp",
        "moe_intermediate_size": "experts.width",
        "n_routed_experts": "experts.num",
        "num_experts_per_tok": "experts.top_k",
        "n_group": "experts.num_groups",
        "topk_group": "experts.chosen_groups",
        "norm_topk_prob": "experts.normalized",
        "routed_scaling_factor": "experts.scale",
        "scoring_func": "experts.scoring",
    },
}
"""For each ``model_type``, the values of an architecture under its keys. ``deepseek_v2`` has those of ``deepseek_v3``."""

OF_ROPE = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
WINDOW = "attention.window"
CONTEXT = 4096
"""``max_position_embeddings`` without a scaling of positions, for a run whose rows were not longer."""


def written_config(values: Mapping[str, Any], dtype: str) -> str | None:
    """The text of the configuration of a model. ``values``: those of a checkpoint's metadata (``core/model/architecture.py``); ``dtype``: of
    its weights.

    None for an architecture that no class of transformers computes, and for values that are not those of an architecture.
    """
    try:
        found = _config({key.removeprefix(f"{PREFIX}."): value for key, value in values.items()}, dtype)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    return None if found is None else json.dumps(found, indent=2) + "\n"


def _config(values: Mapping[str, Any], dtype: str) -> dict[str, Any] | None:
    kind = _model_type(values)
    if kind is None:
        return None
    stacks = values["stacks"]
    length, scaling = _positions(values)
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": sum(stack["num"] for stack in stacks),
        **{key: values[ours] for key, ours in OF_TYPE["deepseek_v3" if kind == "deepseek_v2" else kind].items()},
        "max_position_embeddings": length,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if kind in ("mistral", "mixtral"):
        # Checkpoints of earlier releases have no window.
        config["sliding_window"] = values.get(WINDOW)
    if kind == "mixtral":
        config["router_aux_loss_coef"] = 0.0
    if kind == "deepseek_v3":
        config["num_nextn_predict_layers"] = 0
    if kind.startswith("deepseek"):
        config["first_k_dense_replace"] = sum(stack["num"] for stack in stacks if not stack["experts"])
        config["n_shared_experts"], rest = divmod(values["experts.shared_width"], values["experts.width"])
        config["rope_interleave"] = values["rope.interleaved"]
        config["topk_method"] = _method(kind, values)
        if rest:
            return None
    if config.get("intermediate_size") is None:
        # Of a model whose layers all have experts no layer reads it; a class of transformers wants a number.
        config["intermediate_size"] = values["experts.width"]
    return config


def _model_type(values: Mapping[str, Any]) -> str | None:
    """The class of transformers with the same mathematics; None without one."""
    if "attention.kv_lora" not in values:
        if "experts.num" not in values:
            named = "llama" if values.get(WINDOW) is None else "mistral"
            return None if values["rope.interleaved"] else named
        plain = (values["experts.num_groups"], values["experts.scale"], values["experts.shared_width"]) == (1, 1.0, 0)
        router = values["experts.scoring"], values["experts.normalized"], values["experts.balanced_by_bias"]
        same = plain and router == ("softmax", True, False) and all(stack["experts"] for stack in values["stacks"])
        return "mixtral" if same and not (values["tied"] or values["rope.interleaved"]) else None
    router = values["experts.scoring"], values["experts.balanced_by_bias"]
    if router == ("sigmoid", True):
        return "deepseek_v3"
    # The class of DeepSeek-V2 rotates neighbours, and never normalizes a token's weights.
    second = router == ("softmax", False) and values["rope.interleaved"] and not values["experts.normalized"]
    return "deepseek_v2" if second else None


def _method(kind: str, values: Mapping[str, Any]) -> str:
    if kind == "deepseek_v3":
        return "noaux_tc"
    return "group_limited_greedy" if values["experts.num_groups"] > 1 else "greedy"


def _positions(values: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """The longest row that the model is made for, and the scaling of its positions."""
    kind, own = values["rope.kind"], values["rope.original_length"]
    if kind == "default":
        rows = values.get("length")
        return max(CONTEXT, rows if isinstance(rows, int) else 0), None
    scaling = {name: values[f"rope.{name}"] for name in OF_ROPE[kind]}
    # Earlier versions of transformers read ``type``.
    named = {"type": kind, "rope_type": kind, **scaling, "original_max_position_embeddings": own}
    return int(values["rope.factor"] * own), named
