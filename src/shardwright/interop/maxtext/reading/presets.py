"""MaxText's presets that have a layout of ours with their name: mesh axes and rules, for use where their file is missing.

Taken from MaxText of August 2026 (AI-Hypercomputer/maxtext e591f30cb). A rule is ``name=axis+axis``; their order is their priority.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.interop.maxtext.reading.reading import RuleFile, parse_rule_file

PRESETS: Mapping[str, tuple[str, str]] = {
    "cp-as-ep": (
        "data, stage, fsdp, context, expert",
        """
        activation_embed_and_logits_batch=data+stage+fsdp+expert
        activation_embed_and_logits_batch_sequence=data+stage+fsdp+expert vocab= embed_vocab=fsdp+context+expert
        activation_batch_attn=data+fsdp+expert activation_heads= activation_kv_heads= activation_length_attn=context
        activation_q_length=context activation_kv_length= activation_embed_attn= activation_kv=
        activation_kv_batch=data+fsdp+expert activation_kv_head_dim= heads= q_heads= kv_heads= qkv= kv= kv_head_dim=
        q_lora=fsdp+context+expert q_lora_up_proj= kv_lora=fsdp+context+expert kv_lora_up_proj=
        activation_batch_moe=data+fsdp activation_exp=context+expert exp=context+expert embed_moe=fsdp activation_mlp=
        activation_batch=data+fsdp+expert activation_length=context activation_norm_length=context activation_embed=
        activation_stage=stage mlp= layers=stage embed=fsdp+context+expert
        """,
    ),
    "ep-as-cp": (
        "data, stage, fsdp, expert",
        """
        activation_embed_and_logits_batch=data+stage+fsdp
        activation_embed_and_logits_batch_sequence=data+stage+fsdp+expert vocab= embed_vocab=fsdp+expert
        activation_batch_attn=data+fsdp activation_heads= activation_kv_heads= activation_length_attn=expert
        activation_q_length=expert activation_kv_length= activation_embed_attn= activation_kv=
        activation_kv_batch=data+fsdp activation_kv_head_dim= heads= q_heads= kv_heads= qkv= kv= kv_head_dim=
        q_lora=fsdp q_lora_up_proj= kv_lora=fsdp kv_lora_up_proj= activation_batch_moe=data+fsdp activation_exp=expert
        exp=expert embed_moe=fsdp activation_mlp= activation_batch=data+fsdp activation_length=expert
        activation_norm_length=expert activation_embed= activation_stage=stage mlp= layers=stage embed=fsdp+expert
        """,
    ),
    "ep-as-dp": (
        "data, fsdp, fsdp_transpose, expert",
        """
        activation_embed_and_logits_batch=data+fsdp+fsdp_transpose+expert
        activation_embed_and_logits_batch_sequence=data+fsdp+fsdp_transpose+expert activation_vocab= vocab=
        embed_vocab=fsdp+fsdp_transpose activation_batch_attn=data+fsdp+fsdp_transpose+expert activation_heads=
        activation_kv_heads= activation_length_attn=context activation_q_length=context activation_kv_length=
        activation_embed_attn=tensor+tensor_transpose activation_kv= activation_kv_batch=data+fsdp+fsdp_transpose+expert
        activation_kv_head_dim= q_lora=fsdp q_lora_up_proj= kv_lora=fsdp kv_lora_up_proj=
        activation_batch_moe=data+fsdp+fsdp_transpose+expert activation_length_moe= activation_norm_length_moe=
        activation_embed_moe= activation_mlp_moe= activation_exp=expert exp=expert mlp_moe=fsdp_transpose embed_moe=fsdp
        activation_mlp= activation_batch=data+fsdp+fsdp_transpose+expert activation_length= activation_norm_length=
        activation_embed= activation_stage= mlp=fsdp_transpose embed=fsdp+fsdp_transpose embed=fsdp exp_with_fsdp=fsdp
        """,
    ),
    "shard-exp-on-fsdp": (
        "data, stage, fsdp, fsdp_transpose, context, expert",
        """
        activation_embed_and_logits_batch=data+stage+fsdp+fsdp_transpose+expert
        activation_embed_and_logits_batch_sequence=data+stage+fsdp+fsdp_transpose+context+expert vocab=
        embed_vocab=fsdp+fsdp_transpose+context+expert activation_batch_attn=data+fsdp+fsdp_transpose+expert
        activation_length_attn=context activation_q_length=context activation_kv_batch=data+fsdp+fsdp_transpose+expert
        q_lora=fsdp+fsdp_transpose+expert q_lora_up_proj= kv_lora=fsdp+fsdp_transpose+expert kv_lora_up_proj=
        activation_batch_moe=data+fsdp+fsdp_transpose activation_length_moe=context activation_norm_length_moe=context
        activation_mlp_moe= activation_exp=expert exp=expert+fsdp mlp_moe=fsdp_transpose embed_moe=context
        activation_mlp= activation_batch=data+fsdp+fsdp_transpose+expert activation_length=context
        activation_norm_length=context activation_embed= activation_stage=stage mlp=fsdp_transpose
        embed=fsdp+context+expert norm= layers=stage
        """,
    ),
}


def known_preset(name: str) -> RuleFile | None:
    """The preset of a name; None where none of ours has it.

    >>> [str(line) for line in known_preset("ep-as-cp").rules][:1]
    ['[activation_embed_and_logits_batch, [data, stage, fsdp]]']
    """
    if name not in PRESETS:
        return None
    axes, rules = PRESETS[name]
    pairs = (rule.partition("=") for rule in rules.split())
    lines = [
        f"mesh_axes: [{axes}]",
        f"data_sharding: [[{axes}]]",
        "logical_axis_rules:",
        *(f"  - [{word}, [{', '.join(filter(None, given.split('+')))}]]" for word, _, given in pairs),
    ]
    return parse_rule_file("\n".join(lines), f"custom_mesh_and_rule/{name}, as it is known here")
