"""TorchTitan's activation checkpointing as policies of recomputation, and back.

The oracle of ``selective`` is its own rule, applied by hand to the products of a layer in the order of TorchTitan's modules
(models/common/attention.py, models/deepseek_v3/model.py, models/common/feed_forward.py, models/common/moe.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import InputError
from shardwright.cli.main import main
from shardwright.core.plan.plan import Plan
from shardwright.core.policies.runs import runs_of
from shardwright.interop.torchtitan.export import export_torchtitan
from shardwright.interop.torchtitan.importing import TorchTitanImport, TorchTitanRequest, import_torchtitan
from shardwright.interop.torchtitan.recomputation import per_operation
from shardwright.models import build
from tests.interop.test_torchtitan_export import planned

LLAMA = (
    "attention.queries",
    "attention.keys",
    "attention.values",
    "attention.projected",
    "mlp.gate",
    "mlp.up",
    "mlp.projected",
)
WITH_A_LATENT = (
    "attention.query_latent",
    "attention.queries",
    "attention.latent",
    "keys and values",
    "attention.projected",
)
PRODUCTS = {
    ("llama3-8b", "layers"): LLAMA,
    ("deepseek3-671b", "dense_layers"): (*WITH_A_LATENT, "mlp.gate", "mlp.up", "mlp.projected"),
    ("deepseek3-671b", "moe_layers"): (*WITH_A_LATENT, "shared.gate", "shared.up", "shared.projected"),
    ("deepseek3-16b", "moe_layers"): (
        "attention.queries",
        *WITH_A_LATENT[2:],
        "shared.gate",
        "shared.up",
        "shared.projected",
    ),
}


def file_of(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def imported(file: str, model: str | None = "llama3-test") -> TorchTitanImport:
    return import_torchtitan(TorchTitanRequest(file=file, model=model, devices=8))


def toml(section: str, degrees: str = "data_parallel_shard_degree = 8") -> str:
    return f"[parallelism]\n{degrees}\n[activation_checkpoint]\n{section}\n"


@pytest.mark.parametrize(("model", "stack"), PRODUCTS)
def test_selective_keeps_every_second_product(model: str, stack: str) -> None:
    every_second = {name for number, name in enumerate(PRODUCTS[model, stack], 1) if number % 2}
    expected = {"attention.attended", *every_second} - {"mlp.projected", "shared.projected"}
    if "keys and values" in expected:
        expected = {*expected, "attention.keys_attended", "attention.values_attended"} - {"keys and values"}
    table = build(model)
    (run,) = [one for one in runs_of(table, per_operation(table, ep=1)) if one.stack == stack]
    assert run.named == expected


@pytest.mark.parametrize(
    ("section", "remat"),
    [
        ('mode = "full"', "full"),
        ('mode = "none"', "none,recompute=weights"),
        ('mode = "selective"', "full@1::2+none,recompute=weights"),
        ('mode = "selective"\nselective_ac_option = "1"', "full"),
        ('mode = "selective"\nselective_ac_option = "3"', "full@2::3+none,recompute=weights"),
        ('mode = "selective"\nselective_ac_option = "100"', "none,recompute=weights"),
        ('mode = "selective"\nselective_ac_option = "op"', per_operation(build("llama3-test"), 1)),
        ('mode = "memory_budget"\nmemory_budget = 0.0', "full"),
        ('mode = "memory_budget"\nmemory_budget = 1', "none,recompute=weights"),
    ],
)
def test_modes_of_a_file_with_sections(section: str, remat: str, tmp_path: Path) -> None:
    found = imported(file_of(tmp_path, toml(section)))
    assert found.remat == remat
    assert found.plan is not None
    assert found.plan.request.remat == remat
    assert found.to_json()["remat"] == remat


def test_weights_that_stay_gathered_are_kept(tmp_path: Path) -> None:
    degrees = 'data_parallel_shard_degree = 8\nfsdp_reshard_after_forward = "never"'
    assert imported(file_of(tmp_path, toml('mode = "none"', degrees))).remat == "none"
    in_stages = "pipeline_parallel_degree = 2\ndata_parallel_shard_degree = 4"
    assert imported(file_of(tmp_path, toml('mode = "none"', in_stages))).remat == "none"


def test_a_budget_is_decided_by_its_compiler_and_said(tmp_path: Path) -> None:
    found = imported(file_of(tmp_path, toml('mode = "memory_budget"\nmemory_budget = 0.5')))
    (said,) = [one for one in found.findings if "budget" in one.found]
    assert (said.code, said.severity) == ("SW123", "info")
    assert said.position is not None
    assert said.position.line == 4


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            'mode = "some"',
            "'mode' of 'activation_checkpoint' is one of none, full, selective, memory_budget; found 'some'",
        ),
        ("mode = 3", "found 3"),
        ('selective_ac_option = "0"', "'selective_ac_option' is 'op' or the number of a layer, as '2'; found '0'"),
        ('selective_ac_option = "ops"', "found 'ops'"),
        ("memory_budget = 2", "'memory_budget' is a number from 0 to 1; found 2"),
        ('selective_ac_option = "op"\nper_op_sac_force_recompute_mm_shapes_by_fqns = ["wq"]', "found ['wq']"),
    ],
)
def test_what_is_no_mode_is_one_message_with_its_place(section: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mine\.toml:4:1: ") as caught:
        imported(file_of(tmp_path, toml(section)))
    assert message in str(caught.value)


def test_a_section_that_is_none(tmp_path: Path) -> None:
    text = "activation_checkpoint = 1\n[parallelism]\ndata_parallel_shard_degree = 8\n"
    with pytest.raises(InputError, match="is a section of options"):
        imported(file_of(tmp_path, text))


PYTHON = """from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.trainer import Trainer
import os

def mine():
    config = Trainer.Config(parallelism=ParallelismConfig(data_parallel_shard_degree=8)@)
    return config
"""


@pytest.mark.parametrize(
    ("given", "remat"),
    [
        ("", per_operation(build("llama3-test"), 1)),
        (", activation_checkpoint=None", "none,recompute=weights"),
        (", activation_checkpoint=FullAC.Config(debug=True)", "full"),
        (", activation_checkpoint=SelectiveAC.Config()", per_operation(build("llama3-test"), 1)),
        (", activation_checkpoint=MemoryBudgetAC.Config(memory_budget=0.0)", "full"),
        (", activation_checkpoint=ActivationCheckpointConfig(mode='none')", "none,recompute=weights"),
        (", activation_checkpoint=os.environ['x']", "full"),
    ],
)
def test_modes_of_a_python_file(given: str, remat: str, tmp_path: Path) -> None:
    found = imported(file_of(tmp_path, PYTHON.replace("@", given), "mine.py"))
    assert found.remat == remat
    assert ("activation_checkpoint" in found.chosen) == (not given)
    unknown = [one for one in found.findings if "without running" in one.found]
    assert len(unknown) == ("environ" in given)


def test_a_file_with_degrees_alone_says_nothing(tmp_path: Path) -> None:
    assert imported(file_of(tmp_path, "[parallelism]\ntensor_parallel_degree = 8\n")).remat is None


EP = per_operation(build("deepseek3-test"), 2)


@pytest.mark.parametrize(
    ("layout", "model", "remat", "line"),
    [
        ("fsdp", "llama3-test", "full", "activation_checkpoint=FullAC.Config(),"),
        ("fsdp", "llama3-test", "none,recompute=weights", "activation_checkpoint=None,"),
        ("fsdp", "llama3-test", per_operation(build("llama3-test"), 1), "activation_checkpoint=SelectiveAC.Config(),"),
        ("ep", "deepseek3-test", EP, "activation_checkpoint=SelectiveAC.Config(),"),
    ],
)
def test_an_exported_policy_is_read_again(layout: str, model: str, remat: str, line: str, tmp_path: Path) -> None:
    plan = planned(layout, model, remat=remat)
    export = export_torchtitan(plan)
    assert line in export.text
    assert not [one for one in export.findings if one.severity == "error"]
    assert imported(file_of(tmp_path, export.text, "mine.py"), model).remat == remat


def test_what_torchtitan_cannot_say_is_refused_with_what_it_can() -> None:
    plan: Plan = planned("fsdp", "llama3-test")
    for remat in ("dots", "host=residual.stream", "full@1::2+none,recompute=weights", "keep=mlp.gate"):
        changed = replace(plan, request=replace(plan.request, remat=remat))
        with pytest.raises(InputError, match=r"TorchTitan has policies for all layers: .* Give 'full' or 'keep="):
            export_torchtitan(changed)


def test_the_command_prints_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, toml('mode = "selective"\nselective_ac_option = "2"'))
    assert main(["import", "torchtitan", file, "--model", "llama3-test", "--devices", "8"]) == 0
    assert "full@1::2+none,recompute=weights" in capsys.readouterr().out
