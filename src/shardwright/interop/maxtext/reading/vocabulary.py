"""The vocabulary of MaxText's files: mesh axes, logical names, and the settings that change how rules apply.

Taken from MaxText of August 2026 (AI-Hypercomputer/maxtext e591f30cb). A name that a user has added gets a warning, and an
error where it is similar to a known one.
"""

from __future__ import annotations

from typing import Literal

AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "sequence",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "model",
    "expert",
    "autoregressive",
    "attn_dp",
    "attn_dp_expert",
)
"""Mesh axes that have a size. A mesh with any other axis cannot be built."""

ALWAYS_ONE = ("attn_dp", "attn_dp_expert")
"""Axes of size 1 in any file: they have no key, and a vLLM server sets them at start."""

SIZE_KEY_NAMES = {"stage": "pipeline", "model": "tensor"}
"""Names in size keys that differ from the axis: ``ici_pipeline_parallelism`` is the size of ``stage``."""

FILLS = {"ici": "fsdp", "dcn": "data"}
"""The axis that takes the remaining devices of a slice, or the remaining slices, where no file sets its size."""

GUARDED = (
    "fsdp",
    "fsdp_transpose",
    "sequence",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "stage",
    "expert",
)
"""The axes that MaxText's guard against replicated parameters checks."""

GUARD_TOLERANCE = 0.02

Kind = Literal["text", "true or false", "a number", "a whole number", "a list", "a mapping"]

REMAT = "remat_policy"
REMAT_TENSORS = (
    "decoder_layer_input",
    "context",
    "query_proj",
    "key_proj",
    "value_proj",
    "qkv_proj",
    "query_wa_proj",
    "kv_wa_proj",
    "mla_q",
    "mla_kv",
    "out_proj",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
)
"""The policy of recomputation, and the activations of which a custom one says where they are kept."""

CONTEXT = "context_sharding"
CONTEXT_AXES = ("context", "expert")
"""The key that names the axis of context parallelism, and its values, the default first."""

SETTINGS: dict[str, Kind] = {
    **dict.fromkeys((REMAT, *REMAT_TENSORS), "text"),
    "base_config": "text",
    "override_logical_axis_rules": "true or false",
    "custom_mesh_and_rule": "text",
    "custom_mesh_and_rule_for_eval": "text",
    CONTEXT: "text",
    "moe_dispatch_no_expert_sharding": "true or false",
    "sparse_matmul": "true or false",
    "capacity_factor": "a number",
    "sharding_tolerance": "a number",
    "per_device_batch_size": "a number",
    "max_target_length": "a number",
    "model_name": "text",
    "weight_dtype": "text",
    "dtype": "text",
    "override_model_config": "true or false",
    "scan_layers": "true or false",
    "pipeline_parallel_layers": "a whole number",
    "num_layers_per_pipeline_stage": "a whole number",
    "num_pipeline_repeats": "a whole number",
    "num_pipeline_microbatches": "a whole number",
    "shard_exp_on_fsdp": "true or false",
    "use_2d_fsdp_sharding": "true or false",
    "use_batch_split_schedule": "true or false",
    "student_overrides": "a mapping",
    "context_parallel_strategy": "text",
    "context_parallel_load_balance": "true or false",
    "use_ring_of_experts": "true or false",
    "ragged_buffer_factor": "a number",
    "num_vocab_tiling": "a whole number",
    "gradient_accumulation_steps": "a whole number",
    "grad_dtype": "text",
    "mu_dtype": "text",
    "compile_topology": "text",
    "compile_topology_num_slices": "a whole number",
    "num_slices": "a whole number",
}
"""The other keys that change how rules apply or what a step sends, and the kinds of their values."""

MODELS = {
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "mixtral-8x7b": "mixtral-8x7b",
    "llama3.3-70b": "llama3-70b",
    "deepseek2-16b": "deepseek3-16b",
    "deepseek3-671b": "deepseek3-671b",
}
"""MaxText's ``model_name`` to our table with the same weights, for use where MaxText's file of the model is missing."""

TRAINED = (
    "activation_embed_and_logits_batch",
    "activation_embed_and_logits_batch_sequence",
    "activation_vocab",
    "vocab",
    "embed_vocab",
    "activation_batch_attn",
    "activation_input_length_attn",
    "activation_heads",
    "activation_kv_heads",
    "activation_length_attn",
    "activation_q_length",
    "activation_kv_length",
    "activation_embed_attn",
    "activation_kv",
    "activation_kv_batch",
    "activation_kv_head_dim",
    "heads",
    "q_heads",
    "kv_heads",
    "qkv",
    "kv",
    "kv_head_dim",
    "q_lora",
    "q_lora_up_proj",
    "kv_lora",
    "kv_lora_up_proj",
    "activation_batch_moe",
    "activation_length_moe",
    "activation_norm_length_moe",
    "activation_embed_moe",
    "activation_mlp_moe",
    "activation_exp",
    "exp",
    "mlp_moe",
    "embed_moe",
    "activation_mlp",
    "activation_batch",
    "activation_length",
    "activation_norm_length",
    "activation_embed",
    "activation_stage",
    "mlp",
    "gdn_head",
    "embed",
    "embed_attn",
    "norm",
    "layers",
    "dense_layers",
    "moe_layers",
    "local_layers",
    "circular_repeats",
    "diloco",
    "engram_dim",
    "mhc",
    "mlp_no_fsdp",
    "exp_with_fsdp",
    "expert_only",
    "layers_per_stage",
)
"""Logical names of tensors in a training step of some model."""

SERVED = (
    "prefill_activation_length",
    "prefill_activation_norm_length",
    "activation_prefill_kv_batch",
    "decode_batch",
    "decode_batch_moe",
    "decode_length",
    "cache_heads",
    "cache_batch_prefill",
    "cache_batch",
    "cache_heads_none",
    "cache_kv",
    "cache_sequence",
    "cache_scale_batch",
    "cache_scale_sequence",
    "cache_scale_heads",
    "cache_scale_kv",
    "num_pages",
    "tokens_per_page",
    "paged_kv_heads",
    "paged_kv_head_dim_size",
)
"""Logical names of prefill, decoding and their caches."""

NEVER_RULED = ("indexer_q", "indexer_weights", "o_groups", "o_lora_up_proj", "num_activations")
"""Names of tensors for which no list of MaxText's own has a rule."""

UNUSED = (
    "activation_mlp_moe",
    "paged_kv_heads",
    "num_pages",
    "tokens_per_page",
    "paged_kv_head_dim_size",
    "embed_no_exp",
    "embed_no_exp_moe",
)
"""Names that have rules in MaxText's own lists and that no tensor has."""

LOGICAL_NAMES = (*dict.fromkeys((*TRAINED, *SERVED, *NEVER_RULED, *UNUSED)),)
