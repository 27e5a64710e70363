"""The options of TorchTitan's ``parallelism`` section, with their defaults (pytorch/torchtitan b5bcd76c6, August 2026)."""

from __future__ import annotations

DEGREES: dict[str, int] = {
    "pipeline_parallel_degree": 1,
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "context_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "expert_parallel_degree": 1,
}
"""In the order of the ranks, the last one fastest. Experts borrow ranks of the three degrees before theirs, the fastest first."""

AXES = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
}
"""The mesh axis of each degree whose product is the world size."""

SEQUENCE = "enable_sequence_parallel"
RESHARD = "fsdp_reshard_after_forward"
RESHARDS = ("default", "always", "never")
"""When ``fully_shard`` frees weights that it has gathered: after a layer's forward pass; ``never``: after its backward pass. The default
is ``always``, and ``never`` in a pipeline."""
REMOVED = {"expert_tensor_parallel_degree": "tensor parallelism no longer shards experts (pytorch/torchtitan #3167)"}
"""Degrees of earlier versions that are no longer read, and why."""

NOT_PLACEMENT = (
    "context_parallel_load_balancer",
    "context_parallel_ptrr_mask_key",
    "context_parallel_rotate_method",
    "disable_loss_parallel",
    "enable_async_tensor_parallel",
    "enable_compiled_autograd",
    "enable_fsdp_symm_mem",
    "expert_parallel_comm_backend",
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
"""Options that do not change where a tensor is placed."""

MICROBATCHES = "num_pp_microbatches"
"""Microbatches of a pipeline in one pass; without a pipeline it is not read."""
MICROBATCH_ROWS = "pipeline_parallel_microbatch_size"

SCHEDULE = "pipeline_parallel_schedule"
LAYERS_PER_STAGE = "pipeline_parallel_layers_per_stage"
FIRST_LESS = "pipeline_parallel_first_stage_less_layers"
LAST_LESS = "pipeline_parallel_last_stage_less_layers"
MODULES = "module_fqns_per_model_part"
TIMETABLES = ("pipeline_parallel_schedule_csv", "pipeline_parallel_split_points")
"""The options of a pipeline's stages; a timetable or a split of the user's own is refused."""

KNOWN = (*DEGREES, SEQUENCE, RESHARD, *REMOVED, *NOT_PLACEMENT)
SECTION = "parallelism"
EARLIER_SECTIONS = ("training", "experimental")
"""The sections in which earlier versions had some of the degrees."""

TOKENS = "num_tokens_per_microbatch_per_dp_rank"
STEP_TOKENS = "num_tokens_per_train_step"
CONTEXT = "max_context_length"
TRAINING: dict[str, int] = {TOKENS: 16384, STEP_TOKENS: -1, CONTEXT: 2048}
"""Tokens of a data-parallel rank's microbatch, of the full step (-1: one microbatch of each rank), and of a row."""

LOCAL_ROWS, STEP_ROWS, LENGTH = "local_batch_size", "global_batch_size", "seq_len"
EARLIER_TRAINING: dict[str, int] = {LOCAL_ROWS: 8, STEP_ROWS: -1, LENGTH: 2048}
"""The same in rows, for versions before July 2026. The earliest of them called a rank's rows ``batch_size``."""
FIRST_ROWS = "batch_size"

STORED_IN, COMPUTED_IN = "dtype", "mixed_precision_param"
"""The dtype of weights, gradients and the optimizer's tensors; and that of the computation."""

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
"""The configuration classes that have both sections, with their defaults where none is given."""

MODELS = {
    ("llama3", "1B"): "llama3-1b",
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("deepseek_v3", "16B"): "deepseek3-16b",
    ("deepseek_v3", "671B"): "deepseek3-671b",
}
"""TorchTitan's models that have a table of ours with the same weights."""

SAME_WEIGHTS = ("attn_backend", "tp_gemm_backend", "moe_comm_backend", "non_blocking_capacity_factor")
"""Options of a model that do not change its weights."""
QUANTIZING = (
    "Float8LinearConverter",
    "Float8GroupedExpertsConverter",
    "MXFP8LinearConverter",
    "MXFP8GroupedExpertsConverter",
    "NVFP4LinearConverter",
)
"""Converters that compute in fewer bits and do not change the weights at rest."""
