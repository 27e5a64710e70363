"""Layouts as TorchTitan's degrees and back: the file is read by our reader of its files, and every tensor is in the same place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright import InputError, Request, load_layout, make_plan
from shardwright.cli.main import main
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.plan.plan import Plan
from shardwright.interop.torchtitan.export import export_torchtitan
from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan
from shardwright.layouts import preset_names
from shardwright.models import build

NO_DEGREES = {"fsdp-as-dp-for-attn", "cp-as-ep", "ep-as-dp", "tp-as-ep"}
"""Presets whose roles TorchTitan does not have, for a model with experts."""


def planned(layout: str, model: str = "deepseek3-test", **given: object) -> Plan:
    chosen = load_layout(layout)
    sizes = {axis: 2 for axis, entry in chosen.mesh.items() if entry.size != "auto"}
    if "mesh_sizes" not in given:
        given["mesh_sizes"] = sizes
        given["devices"] = 8
    return make_plan(
        Request(**{"layout": chosen, "table": build(model), "batch": 16, "length": 64, "engine": "torch", **given})  # pyright: ignore[reportArgumentType]
    )


def read_again(plan: Plan, folder: Path) -> Plan:
    path = folder / "exported.py"
    path.write_text(export_torchtitan(plan).text)
    model = plan.request.table.name
    found = import_torchtitan(TorchTitanRequest(file=str(path), model=model, devices=plan.mesh.num_devices)).plan
    assert found is not None
    return found


@pytest.mark.parametrize("layout", sorted({*preset_names()} - {"pp"}))
def test_every_rank_has_the_same_box_of_each_weight(layout: str, tmp_path: Path) -> None:
    plan = planned(layout)
    try:
        export = export_torchtitan(plan)
    except InputError:
        assert layout in NO_DEGREES
        return
    wrong = any(one.severity == "error" for one in export.findings)
    again = read_again(plan, tmp_path)
    same = [
        shard_box(row.at_rest, plan.mesh, row.shape, rank) == shard_box(theirs.at_rest, again.mesh, row.shape, rank)
        for row in plan.weights
        for theirs in (again.by_name[row.name],)
        for rank in range(8)
        if row.at_rest is not None and theirs.at_rest is not None
    ]
    assert len(same) == 8 * len([*plan.weights])
    assert all(same) is not wrong
    assert wrong is (layout in NO_DEGREES), export.findings


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1f1b", "Et|ttt|t|tL"), ("zbv", "E|t|t|tt|t|t|L|"), ("interleaved", None), ("gpipe", None)],
)
def test_stages_make_a_round_trip(schedule: str, stages: str | None, tmp_path: Path) -> None:
    sizes = {"stage": 4, "fsdp": 2}
    if schedule == "zbv":
        sizes, stages = {"stage": 2, "fsdp": 4}, "Et|tt|tt|tL"
    plan = planned("pp", "llama3-test", mesh_sizes=sizes, batch=32, microbatches=8, schedule=schedule, stages=stages)
    export = export_torchtitan(plan)
    assert not export.findings
    again = read_again(plan, tmp_path)
    assert plan.pipeline is not None
    assert again.pipeline is not None
    ours, theirs = plan.pipeline.choice, again.pipeline.choice
    assert (theirs.text, theirs.schedule, theirs.virtual) == (ours.text, ours.schedule, ours.virtual)
    assert theirs.table == ours.table
    assert (again.request.batch, again.request.length, again.request.microbatches) == (32, 64, 8)


def test_the_file_is_python_that_builds_the_options() -> None:
    """Run with classes that keep what they are given."""
    plan = planned("pp", "llama3-test", mesh_sizes={"stage": 2, "fsdp": 4}, microbatches=4, schedule="1f1b")
    export = export_torchtitan(plan)
    lines = [line for line in export.text.splitlines() if not line.startswith("from ")]

    class Trainer:
        Config = dict

    class FullAC:
        Config = dict

    names: dict[str, object] = {"Trainer": Trainer, "FullAC": FullAC, "ParallelismConfig": dict, "TrainingConfig": dict}
    exec("\n".join(lines), names)
    made = names["llama3_test_pp"]()  # pyright: ignore[reportCallIssue]
    assert {**made["training"], **made["parallelism"]} == dict(export.options)
    layers = [name for part in made["parallelism"]["module_fqns_per_model_part"] for name in part]
    assert layers == ["tok_embeddings", *(f"layers.{number}" for number in range(6)), "norm", "output"]


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        (
            "pp",
            {"mesh_sizes": {"stage": 2, "fsdp": 4}, "schedule": "circular"},
            "layout 'pp': TorchTitan has no schedule 'circular'. Give --schedule 1f1b, dualpipev, gpipe, interleaved, looped-bfs, "
            "zbv or zero-bubble.",
        ),
        (
            "fsdp",
            {"mesh_sizes": {"fsdp": 8}, "batch": 24, "microbatches": 2},
            "24 rows of a step do not divide into 2 microbatches of 8 data-parallel ranks, which TorchTitan counts in tokens of a "
            "rank's microbatch. Give --batch 32.",
        ),
    ],
)
def test_what_it_cannot_say_is_one_message(layout: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        export_torchtitan(planned(layout, "llama3-test", **given))
    assert str(caught.value) == message


def test_axes_in_another_order_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "turned.yaml"
    path.write_text("name: turned\nmesh: {fsdp: auto, data: 2}\nroles: {fsdp: fsdp, data: data}\n")
    assert main(["export", "torchtitan", str(path), "--model", "llama3-test", "--devices", "8", "--batch", "8"]) == 2
    assert capsys.readouterr().err == (
        "shardwright: layout 'turned': axis 'data', its dp_replicate, is behind 'fsdp', its dp_shard: TorchTitan's ranks have the "
        "order pp, dp_replicate, dp_shard, cp, tp, the last one fastest. Name the axes of the mesh in this order.\n"
    )


def test_a_list_that_the_program_computes_is_no_silent_default(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    text = (
        "from torchtitan.config import ParallelismConfig\nfrom torchtitan.trainer import Trainer\nfrom mine import parts\n\n"
        "def config():\n    return Trainer.Config(parallelism=ParallelismConfig(pipeline_parallel_degree=2, "
        "module_fqns_per_model_part={}))\n"
    )
    path.write_text(text.format("parts()"))
    with pytest.raises(InputError, match="'module_fqns_per_model_part' is computed by the program"):
        import_torchtitan(TorchTitanRequest(file=str(path), model="llama3-test", devices=4))
    path.write_text(
        text.format("[['tok_embeddings', 'layers.0'], [*(f'layers.{n}' for n in range(1, 6)), 'norm', 'output']]")
    )
    stages = import_torchtitan(TorchTitanRequest(file=str(path), model="llama3-test", devices=4)).stages
    assert stages is not None
    assert stages.units == "Et|t*5L"


def test_json_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "torchtitan", "ep", "--model", "deepseek3-16b", "--devices", "16", "--batch", "32", "--json"]
    assert main([*arguments, "--length", "4096", "--mesh", "expert=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["data_parallel_shard_degree"] == 16
    assert found["options"]["expert_parallel_degree"] == 4
    assert found["findings"] == []
    assert 'model_registry("16B")' in found["text"]
