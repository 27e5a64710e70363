"""Keys that change what a step of MaxText's computes or sends, and that no plan of ours carries over.

Taken from MaxText of August 2026 (AI-Hypercomputer/maxtext e591f30cb): for each key its kind, the values at which it changes nothing, and what
it does at any other.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.interop.maxtext.reading.vocabulary import Kind

NUMBER: Kind = "a number"
INTEGER: Kind = "a whole number"
FLAG: Kind = "true or false"
TEXT: Kind = "text"
Value = str | int | float | bool

LOSS_KEYS: Mapping[str, tuple[Kind, tuple[Value, ...], str]] = {
    "load_balance_loss_weight": (NUMBER, (0,), "a loss that balances the experts"),
    "z_loss_multiplier": (NUMBER, (0,), "a loss of the logits' normalizer"),
    "dropout_rate": (NUMBER, (0,), "dropout"),
    "routed_bias_update_rate": (NUMBER, (0,), "an update of the router's bias by the load of the experts"),
    "indexer_loss_scaling_factor": (NUMBER, (0,), "a loss of the indexer"),
    "training_objective": (TEXT, ("causal_lm",), "another objective than the next token"),
    "use_dpo": (FLAG, (False,), "a loss of preferences"),
    "enable_diloco": (FLAG, (False,), "replicas that are averaged every few steps"),
    "enable_rampup_batch_size": (FLAG, (False,), "fewer rows in the first steps"),
    "skip_step_on_spikes": (FLAG, (False,), "steps that are skipped where the loss jumps"),
}
"""Those that change the training alone."""

COMPUTED_KEYS: Mapping[str, tuple[Kind, tuple[Value, ...], str]] = {
    "quantization": (TEXT, ("",), "products in fewer bits"),
    "opt_type": (TEXT, ("adamw", "adam_pax"), "another optimizer"),
    "sliding_window_size": (INTEGER, (0, -1), "a window of attention"),
    "chunk_attn_window_size": (INTEGER, (0, -1), "attention within chunks"),
    "attn_logits_soft_cap": (NUMBER, (0,), "a soft cap of the scores of attention"),
    "final_logits_soft_cap": (NUMBER, (0,), "a soft cap of the logits"),
    "moba": (FLAG, (False,), "attention to chosen blocks"),
    "use_qk_clip": (FLAG, (False,), "a clip of queries and keys"),
    "use_random_routing": (FLAG, (False,), "experts that are chosen at random"),
    "weight_sparsity_n": (INTEGER, (0,), "sparse weights"),
    "optimizer_memory_host_offload": (FLAG, (False,), "the optimizer's tensors in the memory of the host"),
    "parameter_memory_host_offload": (FLAG, (False,), "weights in the memory of the host"),
    "shard_optimizer_over_data": (FLAG, (False,), "an update of which each replica computes a part"),
    "num_moe_token_chunks": (INTEGER, (1,), "tokens that are sent to the experts in chunks"),
    "num_moe_emb_chunks": (INTEGER, (0,), "tokens that are sent to the experts in chunks"),
    "pipeline_fsdp_ag_once": (FLAG, (False,), "weights of a stage that are gathered once a step"),
    "pipeline_fsdp_ag_per_repeat": (FLAG, (False,), "weights of a stage that are gathered once a repeat"),
    "pipeline_delay_activation_forwarding": (FLAG, (False,), "a pipeline that sends one iteration later"),
    "moe_fsdp_use_two_stage_all_gather": (FLAG, (False,), "experts' weights that are gathered in two steps"),
    "dense_fsdp_use_two_stage_all_gather": (FLAG, (False,), "weights that are gathered in two steps"),
}
"""Those that change what is computed, stored or sent."""

OPTIONS = {"quantization": "--precision", "opt_type": "--optimizer"}
"""The options of ``plan`` that say the same."""

STEP_KEYS = {**LOSS_KEYS, **COMPUTED_KEYS}
