"""The words of TorchTitan's ``parallelism`` section, with their defaults (pytorch/torchtitan b5bcd76c6, August 2026)."""

from __future__ import annotations

DEGREES: dict[str, int] = {
    "pipeline_parallel_degree": 1,
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "context_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "expert_parallel_degree": 1,
}
"""In the order of the ranks, the last one fastest; experts borrow ranks of the three before them, the fastest first."""

AXES = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
}
"""The mesh axis of each degree that multiplies to the world."""

SEQUENCE = "enable_sequence_parallel"
GONE = {"expert_tensor_parallel_degree": "experts are no longer cut by tensor parallelism (pytorch/torchtitan #3167)"}
"""Degrees of earlier versions that nothing reads any more, and why."""

WITHOUT_A_PLACE = (
    "context_parallel_load_balancer",
    "context_parallel_ptrr_mask_key",
    "context_parallel_rotate_method",
    "disable_loss_parallel",
    "enable_async_tensor_parallel",
    "enable_compiled_autograd",
    "enable_fsdp_symm_mem",
    "expert_parallel_comm_backend",
    "fsdp_reshard_after_forward",
    "module_fqns_per_model_part",
    "num_pp_microbatches",
    "pipeline_parallel_expert_parallel_overlap",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_split_points",
    "spmd_backend",
)
"""Options that say how something is done and not where a tensor lives; they are left alone."""

KNOWN = (*DEGREES, SEQUENCE, *GONE, *WITHOUT_A_PLACE)
SECTION = "parallelism"
EARLIER_SECTIONS = ("training", "experimental")
"""Where earlier versions kept some of the degrees."""
