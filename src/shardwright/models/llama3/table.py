"""From the dimensions of a Llama 3 model to its table."""

from __future__ import annotations

from shardwright.core.model.table import ModelTable
from shardwright.models.layers.published import ENDS, FEED_FORWARD, GROUPED_QUERY_ATTENTION, NORMS
from shardwright.models.layers.table import table_of
from shardwright.models.llama3.sizes import Llama3Config
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, Stack
from shardwright.models.parts.size import Size

PUBLISHED = {**ENDS, **NORMS, **GROUPED_QUERY_ATTENTION, **FEED_FORWARD}


def architecture(config: Llama3Config) -> Architecture:
    """The architecture of a model with these dimensions."""
    return Architecture(
        embed=config.embed,
        vocab=config.vocab,
        tied=config.tied,
        norm_eps=config.norm_eps,
        latent_norm_eps=config.norm_eps,
        rope=config.rope,
        attention=GroupedQueryAttention(
            heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim, window=config.window
        ),
        mlp=config.mlp,
        experts=None,
        stacks=(Stack(name="layers", num=config.num_layers),),
        initializer_stddev=config.initializer_stddev,
    )


def table(name: str, size: Size[Llama3Config]) -> ModelTable:
    """The table of a Llama 3 model of any size."""
    return table_of("llama3", name, architecture(size.config), size, PUBLISHED)
