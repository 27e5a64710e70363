"""From the dimensions of a DeepSeek-V3 model to its table."""

from __future__ import annotations

from shardwright.core.model.table import ModelTable
from shardwright.models.deepseek3.sizes import DeepSeek3Config
from shardwright.models.layers.published import ENDS, FEED_FORWARD, NORMS
from shardwright.models.layers.table import table_of
from shardwright.models.parts.architecture import Architecture, Experts, LatentAttention, Stack
from shardwright.models.parts.size import Size

PUBLISHED = {
    **ENDS,
    **NORMS,
    **FEED_FORWARD,
    "attention.q": "self_attn.q_proj.weight",
    "attention.q_down": "self_attn.q_a_proj.weight",
    "attention.q_norm": "self_attn.q_a_layernorm.weight",
    "attention.q_up": "self_attn.q_b_proj.weight",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up": "self_attn.kv_b_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "router.kernel": "mlp.gate.weight",
    "router.bias": "mlp.gate.e_score_correction_bias",
    **{f"moe.{name}": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
}
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
    return table_of("deepseek3", name, architecture(size.config), size, PUBLISHED)
