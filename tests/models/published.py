"""Models of ours as ``transformers`` computes them: configs, logits on our weights, and the models that are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from shardwright.core.model.table import ModelTable
from shardwright.models.parts.architecture import Architecture, Experts, GroupedQueryAttention, LatentAttention
from shardwright.models.parts.rope import Rope
from tests.models.to_published import to_published

ROWS, LENGTH = 2, 48
TOLERANCE = 1e-4
"""Of a logit, absolute."""


def rope_parameters(rope: Rope) -> dict:
    """A ``Rope`` as a config of transformers."""
    if rope.kind == "default":
        return {"rope_type": "default", "rope_theta": rope.theta}
    spelled = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
    }
    own = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }[rope.kind]
    return spelled | {name: getattr(rope, name) for name in own}


def expert_settings(experts: Experts, deepseek: bool) -> dict:
    if not deepseek:
        return {
            "intermediate_size": experts.width,
            "num_local_experts": experts.num,
            "num_experts_per_tok": experts.top_k,
        }
    settings = {
        "moe_intermediate_size": experts.width,
        "n_routed_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
        "n_group": experts.num_groups,
        "topk_group": experts.chosen_groups,
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scale,
        "n_shared_experts": experts.shared_width // experts.width,
    }
    if experts.scoring == "softmax":
        settings["topk_method"] = "group_limited_greedy" if experts.num_groups > 1 else "greedy"
    return settings


def published_config(architecture: Architecture) -> transformers.PreTrainedConfig:
    """The config with which transformers computes an architecture."""
    attention, experts = architecture.attention, architecture.experts
    settings = {
        "vocab_size": architecture.vocab,
        "hidden_size": architecture.embed,
        "num_hidden_layers": sum(stack.num for stack in architecture.stacks),
        "num_attention_heads": attention.heads,
        "rms_norm_eps": architecture.norm_eps,
        "tie_word_embeddings": architecture.tied,
        "rope_parameters": rope_parameters(architecture.rope),
        "max_position_embeddings": int(architecture.rope.factor * architecture.rope.original_length),
        "pad_token_id": None,
    }
    if architecture.mlp is not None:
        settings["intermediate_size"] = architecture.mlp
    if experts is not None:
        settings |= expert_settings(experts, deepseek=isinstance(attention, LatentAttention))
    if isinstance(attention, GroupedQueryAttention):
        settings |= {"num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
        return (transformers.LlamaConfig if experts is None else transformers.MixtralConfig)(**settings)
    settings |= {
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.q_lora,
        "kv_lora_rank": attention.kv_lora,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "first_k_dense_replace": sum(stack.num for stack in architecture.stacks if not stack.experts),
    }
    assert experts is not None
    third = experts.scoring == "sigmoid"
    return (transformers.DeepseekV3Config if third else transformers.DeepseekV2Config)(**settings)


def model_class(config: transformers.PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    name = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    return getattr(transformers, name)


def published_logits(table: ModelTable, weights: dict[str, np.ndarray], tokens: np.ndarray, folder: Path) -> np.ndarray:
    """Logits of transformers on our weights, passed in the format of a published checkpoint."""
    config = published_config(table.architecture)
    tensors = {
        name: np.ascontiguousarray(array)
        for weight in table.weights
        for name, array in to_published(weight, weights[weight.name])
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model, loaded = model_class(config).from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def packed(documents: list[np.ndarray]) -> dict[str, np.ndarray]:
    """A row of documents, and padding up to its length."""
    lengths = [*map(len, documents)]
    padding = LENGTH - sum(lengths)
    return {
        "tokens": np.concatenate([*documents, np.zeros(padding, int)]),
        "positions": np.concatenate([np.arange(num) for num in (*lengths, padding)]),
        "segments": np.repeat([*range(1, len(documents) + 1), 0], [*lengths, padding]),
    }


def one_document(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Positions and segments of rows that are one document each."""
    return {"positions": np.broadcast_to(np.arange(shape[1]), shape), "segments": np.ones(shape)}


# A scaling that begins at 32 tokens changes the angles within the 48 of these tests; at 8,192 it would not show.
LLAMA3_SCALING = {"rope.original_length": "32"}
YARN = {"rope.original_length": "32"}
LITE = {"scoring": "softmax", "routing_bias": "false", "normalized_weights": "false", "routed_scale": "1.5"}

CASES = {
    "llama3": ("llama3-test", LLAMA3_SCALING),
    "llama3 grouped queries": ("llama3-test", {"num_kv_heads": "4", **LLAMA3_SCALING}),
    "llama3 tied, no scaling": ("llama3-test", {"tied": "true", "rope.kind": "default"}),
    "llama3 wide heads": ("llama3-test", {"head_dim": "32", "num_kv_heads": "1", **LLAMA3_SCALING}),
    "mixtral": ("mixtral-test", {}),
    "mixtral top 3, one KV head": ("mixtral-test", {"top_k": "3", "num_kv_heads": "1"}),
    "deepseek3": ("deepseek3-test", YARN),
    "deepseek3 mscale": ("deepseek3-test", {**YARN, "rope.mscale": "0.707", "rope.mscale_all_dim": "0.4"}),
    "deepseek3 plain rope, plain queries": ("deepseek3-test", {"q_lora": "none", "rope.kind": "default"}),
    "deepseek3 two shared, not normalised": (
        "deepseek3-test",
        {"num_shared_experts": "2", "normalized_weights": "false", "num_dense_layers": "2", **YARN},
    ),
    "deepseek2 lite": (
        "deepseek3-test",
        {**LITE, **YARN, "q_lora": "none", "num_groups": "1", "num_chosen_groups": "1"},
    ),
    "deepseek2 groups": ("deepseek3-test", {**LITE, **YARN}),
}
