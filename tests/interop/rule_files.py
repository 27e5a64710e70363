"""Our own small rule files: one without a fault, and edits of it with one fault each."""

from __future__ import annotations

CLEAN = """\
mesh_axes: [data, fsdp, context, tensor, expert]
data_sharding: [[data, fsdp, context, tensor, expert]]
context_sharding: context
ici_fsdp_parallelism: 2
ici_expert_parallelism: 4
logical_axis_rules:
  - [activation_exp, [expert]]
  - [exp, [expert]]
  - [activation_batch_moe, [data, fsdp, expert]]
  - [activation_batch_moe, [data, fsdp]]
  - [activation_length_moe, [context]]
  - [activation_norm_length_moe, [context]]
  - [activation_embed_moe, []]
  - [activation_mlp, [tensor]]
  - [embed_moe, [fsdp]]
  - [mlp_moe, [tensor]]
  - [activation_embed_and_logits_batch, [data, fsdp, expert]]
  - [activation_embed_and_logits_batch_sequence, [data, fsdp, context, expert]]
  - [activation_batch, [data, fsdp, expert]]
  - [activation_batch_attn, [data, fsdp, expert]]
  - [activation_kv_batch, [data, fsdp, expert]]
  - [activation_length, [context]]
  - [activation_norm_length, [context]]
  - [activation_length_attn, [context]]
  - [activation_input_length_attn, [context]]
  - [activation_kv_length, []]
  - [activation_embed, []]
  - [activation_embed_attn, []]
  - [activation_heads, [tensor]]
  - [activation_kv_heads, [tensor]]
  - [activation_kv, []]
  - [activation_kv_head_dim, []]
  - [activation_vocab, [tensor]]
  - [vocab, [tensor]]
  - [embed_vocab, [fsdp, context, expert]]
  - [embed, [fsdp, context, expert]]
  - [q_heads, [tensor]]
  - [kv_heads, [tensor]]
  - [heads, [tensor]]
  - [kv, []]
  - [kv_head_dim, []]
  - [mlp, [tensor]]
  - [norm, []]
  - [layers, []]
"""
"""For mixtral and llama3, on any sizes: no error and no warning."""

PRESET = """\
mesh_axes: [data, fsdp, expert]
data_sharding: [[data, fsdp, expert]]
logical_axis_rules:
  - [activation_batch, [data, fsdp]]
  - [activation_batch_attn, [data, fsdp]]
  - [activation_kv_batch, [data, fsdp]]
  - [activation_embed_and_logits_batch, [data, fsdp]]
  - [activation_embed_and_logits_batch_sequence, [data, fsdp, expert]]
  - [activation_length, [expert]]
  - [activation_norm_length, [expert]]
  - [activation_length_attn, [expert]]
  - [activation_input_length_attn, [expert]]
  - [activation_norm_length_moe, [expert]]
  - [activation_length_moe, [expert]]
  - [activation_batch_moe, [data, fsdp]]
  - [activation_exp, [expert]]
  - [exp, [expert]]
  - [embed_moe, [fsdp]]
  - [embed, [fsdp, expert]]
  - [embed_vocab, [fsdp, expert]]
"""
"""A preset whose experts' axis is for context parallelism outside the experts."""


def edited(text: str, *edits: tuple[str, str]) -> str:
    """The text with each first string, which must be in it once, replaced by the second."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def line(name: str, *axes: str) -> str:
    """
    >>> line("embed", "fsdp", "expert")
    '  - [embed, [fsdp, expert]]\\n'
    """
    return f"  - [{name}, [{', '.join(axes)}]]\n"


def without(text: str, *names: str) -> str:
    """The text without the rules of some names."""
    return "".join(
        each for each in text.splitlines(keepends=True) if not each.startswith(tuple(f"  - [{n}," for n in names))
    )
