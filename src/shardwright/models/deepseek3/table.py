"""From the dimensions of a DeepSeek-V3 model to its table."""

from __future__ import annotations

from shardwright.core.model.table import ModelTable
from shardwright.models.deepseek3.sizes import DeepSeek3Config
from shardwright.models.parts.architecture import Architecture, Experts, LatentAttention, Stack
from shardwright.models.parts.assemble import assemble
from shardwright.models.parts.experts import PublishedNames
from shardwright.models.parts.size import Size

NAMES = PublishedNames(
    router="mlp.gate.weight",
    bias="mlp.gate.e_score_correction_bias",
    gate="mlp.experts.{expert}.gate_proj.weight",
    up="mlp.experts.{expert}.up_proj.weight",
    down="mlp.experts.{expert}.down_proj.weight",
    shared="mlp.shared_experts",
)
LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the latents in the published code. ``norm_eps`` of the config is for the other norms."""


def architecture(config: DeepSeek3Config) -> Architecture:
    """The architecture of a model with these dimensions."""
    dense = config.num_dense_layers
    stacks = (
        Stack(name="dense_layers", num=dense),
        Stack(name="moe_layers", num=config.num_layers - dense, first_layer=dense, experts=True),
    )
    return Architecture(
        embed=config.embed,
        vocab=config.vocab,
        tied=False,
        norm_eps=config.norm_eps,
        latent_norm_eps=LATENT_NORM_EPS,
        rope=config.rope,
        attention=LatentAttention(
            heads=config.num_heads,
            q_lora=config.q_lora,
            kv_lora=config.kv_lora,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            value_dim=config.value_dim,
        ),
        mlp=config.mlp,
        experts=Experts(
            num=config.num_experts,
            width=config.expert_mlp,
            top_k=config.top_k,
            scoring=config.scoring,
            num_groups=config.num_groups,
            chosen_groups=config.num_chosen_groups,
            normalized=config.normalized_weights,
            scale=config.routed_scale,
            balanced_by_bias=config.routing_bias,
            shared_width=config.num_shared_experts * config.expert_mlp,
            capacity_factor=config.capacity_factor,
        ),
        stacks=tuple(stack for stack in stacks if stack.num),
        initializer_stddev=config.initializer_stddev,
    )


def table(name: str, size: Size[DeepSeek3Config]) -> ModelTable:
    """The table of a DeepSeek-V3 model of any size."""
    return assemble("deepseek3", name, architecture(size.config), size, NAMES)
