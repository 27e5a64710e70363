"""From the dimensions of a Mixtral model to its table."""

from __future__ import annotations

from shardwright.core.model.table import ModelTable
from shardwright.models.layers.published import ENDS, GROUPED_QUERY_ATTENTION, NORMS
from shardwright.models.layers.table import table_of
from shardwright.models.mixtral.sizes import MixtralConfig
from shardwright.models.parts.architecture import Architecture, Experts, GroupedQueryAttention, Stack
from shardwright.models.parts.size import Size

PUBLISHED = {
    **ENDS,
    **NORMS,
    **GROUPED_QUERY_ATTENTION,
    "router.kernel": "block_sparse_moe.gate.weight",
    "moe.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "moe.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "moe.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def architecture(config: MixtralConfig) -> Architecture:
    """The architecture of a model with these dimensions."""
    return Architecture(
        embed=config.embed,
        vocab=config.vocab,
        tied=False,
        norm_eps=config.norm_eps,
        latent_norm_eps=config.norm_eps,
        rope=config.rope,
        attention=GroupedQueryAttention(
            heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim, window=config.window
        ),
        mlp=None,
        experts=Experts(
            num=config.num_experts,
            width=config.mlp,
            top_k=config.top_k,
            scoring="softmax",
            normalized=True,
            capacity_factor=config.capacity_factor,
        ),
        stacks=(Stack(name="layers", num=config.num_layers, experts=True),),
        initializer_stddev=config.initializer_stddev,
    )


def table(name: str, size: Size[MixtralConfig]) -> ModelTable:
    """The table of a Mixtral model of any size."""
    return table_of("mixtral", name, architecture(size.config), size, PUBLISHED)
