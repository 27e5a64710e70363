"""A decoder of any family: stacks of layers between an embedding and logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Program, Value
from shardwright.core.program.walk import Walk, walk_through
from shardwright.models.layers.attention import Masks, grouped_query_attention, masks
from shardwright.models.layers.ends import batch_fields, embedding, logits_and_loss
from shardwright.models.layers.experts import routed_experts
from shardwright.models.layers.feed_forward import feed_forward
from shardwright.models.layers.latent_attention import latent_attention
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, Stack

AFTER_ATTENTION = "residual.middle"
"""The residual stream between the two parts of a layer."""


@lru_cache(maxsize=64)
def program_of(architecture: Architecture) -> Program:
    """The program of an architecture."""
    draft = Draft(sizes=sizes_of(architecture), initializer_stddev=architecture.initializer_stddev)
    draft.section("ends")
    batch = batch_fields(draft)
    stream = embedding(draft, batch)
    draft.section("attention")
    attended = masks(draft, batch)
    for stack in architecture.stacks:
        stream = draft.layers(
            stack.name,
            stack.num,
            lambda stream, stack=stack: layer(draft, stream, stack, architecture, attended, batch),
            stream,
        )
    draft.section("ends")
    logits_and_loss(draft, stream, batch, architecture)
    return draft.finished()


@lru_cache(maxsize=64)
def walk_of(architecture: Architecture) -> Walk:
    """The program of an architecture as an engine walks it."""
    return walk_through(program_of(architecture))


def layer(
    draft: Draft, stream: Value, stack: Stack, architecture: Architecture, masks: Masks, batch: Mapping[str, Value]
) -> Value:
    """One layer: attention, then a feed-forward layer or experts, each of the normed stream and added to it."""
    residual, attention = draft.part("residual"), architecture.attention
    draft.section("attention")
    if isinstance(attention, GroupedQueryAttention):
        attended = grouped_query_attention(draft, stream, masks, architecture, attention)
    else:
        attended = latent_attention(draft, stream, masks, architecture, attention)
    draft.section("middle")
    stream = residual.add(stream, attended, name="middle")
    normed = residual.norm(stream, "feed_forward_norm", eps=architecture.norm_eps)
    if not stack.experts:
        assert architecture.mlp is not None
        draft.section("mlp")
        return residual.add(stream, feed_forward(draft, normed, "mlp", architecture.mlp), name="stream")
    assert architecture.experts is not None
    draft.section("experts")
    routed = routed_experts(draft, normed, batch, architecture.experts)
    if not architecture.experts.shared_width:
        return residual.add(stream, routed, name="stream")
    draft.section("shared experts")
    shared = feed_forward(draft, normed, "shared", architecture.experts.shared_width)
    return residual.add(stream, routed, shared, name="stream")


def sizes_of(architecture: Architecture) -> Mapping[str, int]:
    """Elements along each dim, by its letter in a program."""
    attention, experts = architecture.attention, architecture.experts
    sizes = {"M": architecture.embed, "V": architecture.vocab, "H": attention.heads, "D": attention.head_dim}
    if isinstance(attention, GroupedQueryAttention):
        sizes["K"] = attention.kv_heads
    else:
        sizes |= {"N": attention.kv_lora, "R": attention.latent}
        if attention.q_lora:
            sizes["Q"] = attention.q_lora
    if any(stack.experts for stack in architecture.stacks):
        assert experts is not None
        sizes |= {"Z": experts.num, "X": experts.num, "A": experts.top_k}
    mlp = architecture.mlp or (experts.width if experts else None)
    return {**sizes, "F": mlp} if mlp else sizes
