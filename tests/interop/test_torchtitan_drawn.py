"""Drawn files of TorchTitan: no option is dropped in silence, and the printed command plans what the import planned.

The oracle of the first is the import itself, of the same file with another value of one option: what is not listed as not read changes
what the import says, or is refused. The oracle of the second is ``shardwright plan``.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright import InputError
from shardwright.cli.main import main
from shardwright.core.findings.errors import FindingsError

OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "parallelism": {
        "data_parallel_replicate_degree": (1, 2),
        "data_parallel_shard_degree": (2, 4),
        "tensor_parallel_degree": (1, 2),
        "context_parallel_degree": (1, 2),
        "pipeline_parallel_degree": (1, 2),
        "enable_sequence_parallel": (True, False),
        "fsdp_reshard_after_forward": ("default", "always", "never"),
        "enable_async_tensor_parallel": (True, False),
        "context_parallel_load_balancer": ("headtail", "ptrr"),
        "spmd_backend": ("spmd_types", "partial_dtensor"),
        "enable_fsdp_symm_mem": (True, False),
    },
    "training": {
        "local_batch_size": (2, 4),
        "seq_len": (64, 128),
        "dtype": ("float32", "bfloat16"),
        "mixed_precision_param": ("float32", "bfloat16"),
        "mixed_precision_reduce": ("float32",),
        "steps": (10, 20),
        "max_norm": (1.0, 2.0),
        "enable_cpu_offload": (True, False),
    },
    "activation_checkpoint": {"mode": ("none", "full", "selective"), "early_stop": (True, False)},
    "compile": {
        "enable": (True, False),
        "enable_async_tensor_parallel": (True, False),
        "backend": ("inductor", "eager"),
    },
    "float8": {"enable_fsdp_float8_all_gather": (True, False)},
    "mx": {"recipe_name": ("mxfp8", "mxfp8_cublas")},
    "optimizer": {"name": ("AdamW", "Adam"), "lr": (0.1, 0.2)},
}
WITHOUT_A_PIPELINE = ("fsdp_reshard_after_forward", "enable_sequence_parallel")
"""Options that say nothing under some degrees."""


def drawn_file(rng: random.Random) -> dict[str, dict[str, Any]]:
    """The sections of a file with a few options of each."""
    file = {
        "parallelism": {"data_parallel_shard_degree": rng.choice((2, 4))},
        "training": {"local_batch_size": 4, "seq_len": 64},
    }
    for section, options in OPTIONS.items():
        for name in rng.sample([*options], rng.randint(0, len(options))):
            file.setdefault(section, {})[name] = rng.choice(options[name])
    return file


def rendered(file: dict[str, dict[str, Any]], kind: str) -> str:
    if kind == "json":
        return json.dumps(file)
    if kind == "toml":
        return "\n".join(
            line
            for section, options in file.items()
            for line in (f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in options.items()))
        )
    classes = {
        "parallelism": "ParallelismConfig",
        "training": "TrainingConfig",
        "activation_checkpoint": "ActivationCheckpointConfig",
    }
    sections = (
        f"{section}={classes.get(section, section.title() + '.Config')}({', '.join(f'{n}={v!r}' for n, v in options.items())})"
        for section, options in file.items()
    )
    return f"def mine():\n    return Trainer.Config({', '.join(sections)})\n"


def imported(
    folder: Path, file: dict[str, dict[str, Any]], kind: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any] | str:
    """What the command says of a file, as JSON and as a view; the message of a refusal."""
    path, layout = folder / f"mine.{kind}", folder / "mine.yaml"
    path.write_text(rendered(file, kind), encoding="utf-8")
    options = ["--model", "llama3-test", "--out", str(layout)]
    capsys.readouterr()
    if main(["import", "torchtitan", str(path), *options, "--json"]) == 2:
        return capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def paths(file: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    return ((section, name) for section, options in file.items() for name in options)


def without_place(found: dict[str, Any]) -> dict[str, Any]:
    """What an import says, without positions in the file."""
    return {**found, "findings": [(each["code"], each["found"], each["fix"]) for each in found["findings"]]}


def planned(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[0] == "shardwright"
    main([*words[1:], "--json"])
    return json.loads(capsys.readouterr().out)


def check_drawn(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Draws one file and holds both laws; returns what became of it."""
    rng = random.Random(number)
    file, kind = drawn_file(rng), rng.choice(("toml", "json", "py"))
    found = imported(folder, file, kind, capsys)
    if isinstance(found, str):
        assert found.startswith(("shardwright: ", "error ")), found
        return "refused"
    listed = {text.split(" ")[0] for text in found["not_read"]}
    for section, name in paths(file):
        others = [value for value in OPTIONS[section][name] if value != file[section][name]]
        if not others:
            continue
        changed = {**file, section: {**file[section], name: rng.choice(others)}}
        again = imported(folder, changed, kind, capsys)
        same = not isinstance(again, str) and without_place(again) == without_place(found)
        if f"{section}.{name}" in listed:
            assert same, (section, name)
        elif name not in WITHOUT_A_PIPELINE:
            assert not same, (section, name)
    imported(folder, file, kind, capsys)
    if found["plan_it"] is None:
        return "without a plan"
    plan = planned(found["plan_it"], capsys)
    assert plan["tensors"][: len(found["tensors"])] == found["tensors"]
    return "planned"


@pytest.mark.parametrize("number", range(4))
def test_drawn_files(number, tmp_path, capsys):
    check_drawn(number, tmp_path, capsys)


@pytest.mark.matrix
def test_many_drawn_files(tmp_path, capsys):
    kinds = [check_drawn(number, tmp_path, capsys) for number in range(100, 250)]
    assert kinds.count("planned") > 60


def test_the_printed_command_plans_what_the_import_planned(tmp_path, capsys):
    """The entire plan, of the import in this process and of the command."""
    from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan

    commands = 0
    for number in range(40):
        rng = random.Random(number)
        path = tmp_path / "mine.toml"
        path.write_text(rendered(drawn_file(rng), "toml"), encoding="utf-8")
        layout = str(tmp_path / "mine.yaml")
        try:
            found = import_torchtitan(TorchTitanRequest(file=str(path), model="llama3-test", name="mine", out=layout))
        except (InputError, FindingsError):
            continue
        if found.command is None or commands == 2:
            continue
        main(["import", "torchtitan", str(path), "--model", "llama3-test", "--out", layout])
        capsys.readouterr()
        plan, of_command = found.plan.to_json(), planned(found.command, capsys)
        plan.pop("findings"), of_command.pop("findings")
        assert json.loads(json.dumps(plan)) == of_command, found.command
        commands += 1
    assert commands == 2
