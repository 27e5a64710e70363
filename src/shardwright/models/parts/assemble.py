"""From an architecture to its table, with the same rows for every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.core.model.table import ModelTable
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention
from shardwright.models.parts.attention import grouped_query_attention
from shardwright.models.parts.ends import ends
from shardwright.models.parts.experts import PublishedNames, experts_feed_forward
from shardwright.models.parts.feed_forward import dense_feed_forward, feed_forward_norms
from shardwright.models.parts.latent_attention import latent_attention
from shardwright.models.parts.rows import TableRows, joined, num_layers
from shardwright.models.parts.size import Size


def assemble(
    family: str,
    name: str,
    architecture: Architecture,
    size: Size[Any],
    names: PublishedNames | None = None,
) -> ModelTable:
    """The table of an architecture, with all of a size but its dimensions; ``names`` are needed if it has experts."""
    attention, experts = architecture.attention, architecture.experts
    groups = [
        ends(architecture),
        grouped_query_attention(architecture, attention)
        if isinstance(attention, GroupedQueryAttention)
        else latent_attention(architecture, attention),
        feed_forward_norms(architecture),
        dense_feed_forward(architecture, architecture.mlp) if architecture.mlp else TableRows(),
    ]
    if experts is not None:
        assert names is not None
        groups.append(experts_feed_forward(architecture, experts, names))
    rows = joined(groups)
    return ModelTable(
        family=family,
        name=name,
        sizes=_sizes(architecture),
        weights=rows.weights,
        activations=rows.activations,
        moves=rows.moves,
        operations=rows.operations,
        num_layers=num_layers(architecture.stacks),
        dtype=size.dtype,
        top_k=experts.top_k if experts else None,
        expert_groups=experts.num_groups if experts else 1,
        chosen_groups=experts.chosen_groups if experts else 1,
        capacity_factor=experts.capacity_factor if experts else None,
        attention_window=attention.window if isinstance(attention, GroupedQueryAttention) else None,
        program="ours",
        architecture=architecture,
        natural_layout=size.natural.layout,
        natural_mesh=size.natural.mesh,
        natural_batch=size.natural.batch,
        natural_length=size.natural.length,
        training_only=size.training_only,
    )


def _sizes(architecture: Architecture) -> Mapping[str, int]:
    attention, experts = architecture.attention, architecture.experts
    sizes = {
        "embed": architecture.embed,
        "vocab": architecture.vocab,
        "heads": attention.heads,
        "head_dim": attention.head_dim,
    }
    if isinstance(attention, GroupedQueryAttention):
        sizes["kv_heads"] = attention.kv_heads
    else:
        sizes |= {"kv_lora": attention.kv_lora, "latent": attention.latent}
        if attention.q_lora:
            sizes["q_lora"] = attention.q_lora
    if any(stack.experts for stack in architecture.stacks):
        assert experts is not None
        sizes |= {"scores": experts.num, "experts": experts.num, "top_k": experts.top_k}
    mlp = architecture.mlp or (experts.width if experts else None)
    if mlp:
        sizes["mlp"] = mlp
    return sizes
