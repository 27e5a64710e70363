"""Inputs of the cases before damage: presets and other layouts, locks, plans, manifests, command lines, and files of other programs."""

from __future__ import annotations

import contextlib
import io
import json
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.cli.main import main
from shardwright.core.layout.layout import Layout
from shardwright.interop.layout_text import layout_text
from shardwright.layouts import load_layout, preset_names
from tests.interop.rule_files import CLEAN, PRESET
from tests.interop.torchtitan_programs import HEAD, READ, REFUSED

MODELS = {"llama3-test": "num_layers=2", "mixtral-test": "num_layers=2", "deepseek3-test": "num_layers=2"}
RULES = """\
name: mine
about: 'Rules of its own.'
mesh: {fsdp: 2, expert: 4}
roles:
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert, weights: [embed, heads], sequence_parallel: false}
move: {attention: ring, moe: all-to-all}
rules:
  attention: {kv_heads: [], embed: [fsdp]}
"""
TITAN_TOML = """\
[model]
name = "llama3"
flavor = "8B"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
context_parallel_degree = 2
pipeline_parallel_degree = 1
expert_parallel_degree = 4
enable_sequence_parallel = true
[training]
local_batch_size = 4
global_batch_size = 64
seq_len = 4096
"""
CONFIGS = (
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "tp_plan": {
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        },
    },
    {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "vocab_size": 2048,
    },
)
PLAN_OF_MODULES = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}


@cache
def layouts() -> tuple[str, ...]:
    """The presets as a user's files, and one with rules."""
    made: list[Layout] = [load_layout(name) for name in preset_names()]
    return (*(layout_text(layout) for layout in made), RULES)


def output_of(*arguments: str) -> str:
    """The output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main(list(arguments))
    return out.getvalue()


@cache
def plans() -> tuple[str, ...]:
    """``plan --json`` of a few models."""
    return tuple(
        output_of("plan", model, "--set", small, "--layout", layout, "--json")
        for (model, small), layout in zip(MODELS.items(), ("fsdp", "ep-as-cp", "hsdp"), strict=True)
    )


MINE = "name: mine\nmesh: {fsdp: 2, expert: 4}\nroles:\n  fsdp: fsdp\n  expert: {elsewhere: context, moe: expert}\n"
"""A layout to which locks refer, as ``mine.yaml`` in the same folder."""


@cache
def locks() -> tuple[str, ...]:
    """Lock files of presets and of ``MINE``."""
    made = []
    with TemporaryDirectory() as folder, chdir(folder):
        Path("mine.yaml").write_text(MINE)
        for model, layout in (("mixtral-test", "mine.yaml"), ("llama3-test", "fsdp"), ("deepseek3-test", "ep-as-cp")):
            output_of("lock", model, "--set", MODELS[model], "--layout", layout, "--out", "seed.lock.json")
            made.append(Path("seed.lock.json").read_text())
    return tuple(made)


def programs() -> tuple[str, ...]:
    """Configurations of TorchTitan in Python."""
    return tuple(f"{HEAD}def mine():\n    {body}\n" for body in (*READ.values(), *REFUSED.values()))


def rules() -> tuple[str, ...]:
    """Files of MaxText."""
    return CLEAN, PRESET, f"base_config: base.yml\nmodel_name: mixtral-8x7b\n{CLEAN}"


@cache
def configs() -> tuple[str, ...]:
    return (*(json.dumps(config, indent=2) for config in CONFIGS), json.dumps(PLAN_OF_MODULES))
