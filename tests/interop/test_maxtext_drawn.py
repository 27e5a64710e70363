"""Drawn files of MaxText: no key is dropped in silence, and the printed command plans what the import planned.

The oracle of the first is the import itself, of the same file with another value of one key: a key that is not listed as not read changes
what the import says, or is refused. The oracle of the second is ``shardwright plan``.
"""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.interop.maxtext.importing import import_maxtext
from shardwright.interop.maxtext.sources import MaxTextRequest
from tests.interop.rule_files import CLEAN

KEYS: dict[str, tuple[Any, ...]] = {
    "ici_fsdp_parallelism": (1, 2, 4),
    "ici_expert_parallelism": (1, 2, 4),
    "ici_context_parallelism": (1, 2),
    "ici_tensor_parallelism": (1, 2),
    "per_device_batch_size": (2, 4),
    "max_target_length": (64, 128),
    "gradient_accumulation_steps": (1, 2, 4),
    "num_vocab_tiling": (1, 2),
    "dtype": ("float32", "bfloat16"),
    "weight_dtype": ("float32", "bfloat16"),
    "remat_policy": ("full", "minimal", "save_out_proj"),
    "use_ring_of_experts": (True, False),
    "ragged_buffer_factor": (-1.0, 1.5, 2.0),
    "context_sharding": ("context", "expert", "tensor"),
    "context_parallel_strategy": ("all_gather", "ring", "usp"),
    "load_balance_loss_weight": (0.0, 0.01),
    "z_loss_multiplier": (0.0, 0.1),
    "dropout_rate": (0.0, 0.1),
    "quantization": ("", "fp8"),
    "opt_type": ("adamw", "muon"),
    "sliding_window_size": (0, 64),
    "steps": (10, 20),
    "learning_rate": (0.1, 0.2),
    "run_name": ("mine", "yours"),
    "attention": ("flash", "dot_product"),
    "sa_block_q": (256, 512),
    "load_balance_loss": (0.0, 0.01),
    "expert_shard_attention_option": ("context", "fsdp"),
}
SILENT = ("ragged_buffer_factor", "context_parallel_strategy", "context_sharding", "ici_expert_parallelism")
"""Keys that say nothing on some meshes: of axes of size 1, and of those that other keys leave without effect."""


def drawn_keys(rng: random.Random) -> dict[str, Any]:
    """Sizes and a few other keys."""
    sizes = {key: rng.choice(values) for key, values in KEYS.items() if key.startswith("ici_")}
    others = [key for key in KEYS if key not in sizes]
    return {**sizes, **{key: rng.choice(KEYS[key]) for key in rng.sample(others, rng.randint(2, 8))}}


def imported(
    folder: Path, keys: dict[str, Any], on_command_line: bool, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any] | str:
    """What the command says, as JSON; the message of a refusal."""
    rules = CLEAN[CLEAN.index("logical_axis_rules") :]
    head = "mesh_axes: [data, fsdp, context, tensor, expert]\n"
    pairs = {key: json.dumps(value) if not isinstance(value, str) else value for key, value in keys.items()}
    if not on_command_line:
        head += "".join(f"{key}: {value or repr('')}\n" for key, value in pairs.items())
    (folder / "mine.yml").write_text(head + rules, encoding="utf-8")
    pasted = [f"{key}={value}" for key, value in pairs.items()] if on_command_line else []
    model = ["--model", "mixtral-test", "--out", str(folder / "mine.yaml"), "--json"]
    capsys.readouterr()
    code = main(["import", "maxtext", str(folder / "mine.yml"), *pasted, *model])
    out, err = capsys.readouterr()
    return err or out if code == 2 else json.loads(out)


def without_place(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "findings": [(each["code"], each["found"], each["fix"]) for each in found["findings"]],
        "rules": None,
    }


def check_drawn(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Draws one file and holds both laws; returns what became of it."""
    rng = random.Random(number)
    keys, on_command_line = drawn_keys(rng), rng.random() < 0.5
    found = imported(folder, keys, on_command_line, capsys)
    if isinstance(found, str):
        assert "Traceback" not in found
        return "refused"
    for key, value in keys.items():
        others = [other for other in KEYS[key] if other != value]
        again = imported(folder, {**keys, key: rng.choice(others)}, on_command_line, capsys)
        same = not isinstance(again, str) and without_place(again) == without_place(found)
        unknown = any(f"'{key}'" in each["where"] and each["code"] == "SW111" for each in found["findings"])
        if unknown and key != "context_sharding":
            continue
        if key in found["not_read"]:
            assert same, key
        elif key not in SILENT:
            assert not same, key
    imported(folder, keys, on_command_line, capsys)
    if found["plan_it"] is None:
        return "without a plan"
    words = shlex.split(found["plan_it"])
    main([*words[1:], "--json"])
    plan = json.loads(capsys.readouterr().out)
    passes = keys.get("gradient_accumulation_steps", 1)
    assert (plan["batch"], plan["length"]) == (found["batch"] * passes, found["length"])
    return "planned"


@pytest.mark.parametrize("number", range(4))
def test_drawn_files(number, tmp_path, capsys):
    check_drawn(number, tmp_path, capsys)


@pytest.mark.matrix
def test_many_drawn_files(tmp_path, capsys):
    kinds = [check_drawn(number, tmp_path, capsys) for number in range(100, 200)]
    assert kinds.count("planned") > 30, kinds


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"use_ring_of_experts": True, "gradient_accumulation_steps": 2, "remat_policy": "minimal"},
            ("move: {moe: ring}", "--microbatches 2", "--remat keep="),
        ),
        (
            {"ragged_buffer_factor": 1.5, "weight_dtype": "bfloat16", "dtype": "bfloat16", "num_vocab_tiling": 2},
            ("--expert-buffer 1.5", "--weights-dtype bfloat16", "--dtype bfloat16", "--loss-chunks 2"),
        ),
        (
            {
                "context_parallel_strategy": "ring",
                "context_parallel_load_balance": True,
                "weight_dtype": "bfloat16",
                "mu_dtype": "float32",
            },
            ("move: {attention: ring}", "--load-balance", "--moments-dtype float32,bfloat16"),
        ),
    ],
)
def test_the_printed_command_plans_what_the_import_planned(more, words, tmp_path, capsys):
    """The entire plan, of the import in this process and of the command."""
    sizes = {f"ici_{axis}_parallelism": 2 for axis in ("fsdp", "expert", "context")}
    keys = {**sizes, "per_device_batch_size": 2, "max_target_length": 64, **more}
    of_import = imported(tmp_path, keys, False, capsys)
    found = import_maxtext(
        MaxTextRequest(file=str(tmp_path / "mine.yml"), model="mixtral-test", out=str(tmp_path / "mine.yaml"))
    )
    assert isinstance(of_import, dict)
    assert found.command == of_import["plan_it"]
    assert found.comparison is not None
    main([*shlex.split(str(found.command))[1:], "--json"])
    of_command = json.loads(capsys.readouterr().out)
    plan = json.loads(json.dumps(found.comparison.plan.to_json()))
    del plan["findings"], of_command["findings"]
    assert plan == of_command
    said = f"{of_import['layout']} {found.command}"
    assert [word for word in words if word not in said] == []
