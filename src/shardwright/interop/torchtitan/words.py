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

MICROBATCHES = "num_pp_microbatches"
"""Micro-batches of a pipeline in one pass; without a pipeline nothing reads it."""
MICROBATCH_ROWS = "pipeline_parallel_microbatch_size"

KNOWN = (*DEGREES, SEQUENCE, *GONE, *WITHOUT_A_PLACE)
SECTION = "parallelism"
EARLIER_SECTIONS = ("training", "experimental")
"""Where earlier versions kept some of the degrees."""

TOKENS = "num_tokens_per_microbatch_per_dp_rank"
STEP_TOKENS = "num_tokens_per_train_step"
CONTEXT = "max_context_length"
TRAINING: dict[str, int] = {TOKENS: 16384, STEP_TOKENS: -1, CONTEXT: 2048}
"""What a step is of: tokens of a data-parallel rank's micro-batch, of the whole step (-1: one of each), of a row."""

LOCAL_ROWS, STEP_ROWS, LENGTH = "local_batch_size", "global_batch_size", "seq_len"
EARLIER_TRAINING: dict[str, int] = {LOCAL_ROWS: 8, STEP_ROWS: -1, LENGTH: 2048}
"""The same in rows, as versions before July 2026 have it; the first of them called a rank's rows ``batch_size``."""
FIRST_ROWS = "batch_size"

SECTIONS = {SECTION: "ParallelismConfig", "training": "TrainingConfig"}
"""The classes of the two sections that are read."""

TRAINERS = (
    "Trainer.Config",
    "FluxTrainer.Config",
    "GraphTrainer.Config",
    "FaultTolerantTrainer.Config",
    "PolicyTrainer.Config",
    "TransformersBackendConfig",
)
"""The configurations that have both sections with their defaults where nobody gives them."""

MODELS = {
    ("llama3", "1B"): "llama3-1b",
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("deepseek_v3", "16B"): "deepseek3-16b",
    ("deepseek_v3", "671B"): "deepseek3-671b",
}
"""Which of TorchTitan's models are tables of ours, weight by weight."""

SAME_WEIGHTS = ("attn_backend", "tp_gemm_backend", "moe_comm_backend", "non_blocking_capacity_factor")
"""Options of a model that leave its weights as they are."""
QUANTIZING = (
    "Float8LinearConverter",
    "Float8GroupedExpertsConverter",
    "MXFP8LinearConverter",
    "MXFP8GroupedExpertsConverter",
    "NVFP4LinearConverter",
)
"""Converters that compute in fewer bits, and leave the weights at rest as they are."""
