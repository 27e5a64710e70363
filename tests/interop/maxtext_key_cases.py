"""Cases of single keys: the axis of context parallelism, keys that MaxText does not have, and those that no plan carries over."""

from __future__ import annotations

from tests.interop.maxtext_case import CLEAN_FILE, Case, mine
from tests.interop.rule_files import CLEAN, PRESET, line

KEY_CASES: tuple[Case, ...] = (
    Case(
        name="SW112-context-overwritten",
        files={"model.yml": "context_sharding: context\n", "base.yml": CLEAN, "preset.yml": PRESET},
        options={"base": "base.yml", "preset": "preset.yml", "given": ("context_sharding=context",)},
        # A base has MaxText's default, which its own preset is meant to replace.
        neighbour_options={"given": ()},
        where="context_sharding",
    ),
    Case(
        name="SW112-context-of-another-axis",
        files=mine(("context_sharding: context", "context_sharding: expert")),
        options={"mesh_sizes": {"fsdp": 2, "context": 2, "expert": 2}},
        neighbour_files=CLEAN_FILE,
        where="context_sharding",
    ),
    Case(
        name="SW112-context-of-size-1",
        files=mine(("context_sharding: context", "context_sharding: expert")),
        options={"mesh_sizes": {"fsdp": 2}, "model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
        where="context_sharding",
    ),
    Case(
        name="SW112-context-not-stated",
        files=mine(
            ("context_sharding: context", "scan_layers: true"),
            (line("activation_length", "context"), line("activation_length", "expert")),
        ),
        neighbour_files=mine(
            ("context_sharding: context", "context_sharding: expert"),
            (line("activation_length", "context"), line("activation_length", "expert")),
        ),
        where="context_sharding",
    ),
    Case(
        name="SW111-context-unknown",
        files=mine(("context_sharding: context", "context_sharding: tensor")),
        neighbour_files=CLEAN_FILE,
        where="context_sharding",
    ),
    Case(
        name="SW111-key-removed",
        files=mine(("context_sharding: context", "context_sharding: context\nexpert_shard_attention_option: context")),
        neighbour_files=CLEAN_FILE,
        where="expert_shard_attention_option",
    ),
    Case(
        name="SW111-ring-without-experts",
        files={"rules.yml": "use_ring_of_experts: true\n" + CLEAN},
        options={"mesh_sizes": {"fsdp": 8, "expert": 1}},
        neighbour_options={"mesh_sizes": {"fsdp": 2, "expert": 4}},
        where="use_ring_of_experts",
    ),
    Case(
        name="SW123-balancing-loss",
        files={"rules.yml": "load_balance_loss_weight: 0.01\n" + CLEAN},
        neighbour_files=CLEAN_FILE,
        where="load_balance_loss_weight",
    ),
    Case(
        name="SW123-quantized",
        files={"rules.yml": "quantization: fp8\n" + CLEAN},
        neighbour_files=CLEAN_FILE,
        where="quantization",
    ),
    Case(
        name="SW123-another-attention",
        files={"rules.yml": "attention_type: local_sliding\n" + CLEAN},
        neighbour_files=CLEAN_FILE,
        where="attention_type",
    ),
    Case(
        name="SW123-another-movement-of-keys",
        files={"rules.yml": "context_parallel_strategy: usp\n" + CLEAN},
        neighbour_files=CLEAN_FILE,
        where="context_parallel_strategy",
    ),
    Case(
        name="SW112-context-elsewhere",
        files=mine(
            (line("activation_length", "context"), line("activation_length", "tensor")),
        ),
        options={"mesh_sizes": {"fsdp": 2, "tensor": 4}, "model": "llama3-test"},
        neighbour_files=CLEAN_FILE,
        where="context_sharding",
    ),
)
