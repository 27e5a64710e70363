"""`list` has every name that an option takes, and `explain MODEL TENSOR` says of every axis what it shards, as the plan has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.codes import CODES
from shardwright.core.plan.plan import Plan
from shardwright.core.why import reasons
from shardwright.cost.hardware.chips import chips
from shardwright.layouts import preset_names
from shardwright.models import names
from shardwright.training.optimizers import OPTIMIZERS
from tests.golden.layouts_matrix import cases, make


def said(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert main([*line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("models", set(names())),
        ("layouts", set(preset_names())),
        ("chips", set(chips())),
        ("recipes", {"fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"}),
        ("optimizers", set(OPTIMIZERS)),
        ("findings", set(CODES)),
    ],
)
def test_every_name_is_listed(capsys: pytest.CaptureFixture[str], of: str, expected: set[str]) -> None:
    assert {row["name"] for row in said(capsys, f"list {of}")[of]} == expected
    assert main(["list", of]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in expected)


def test_chips_are_listed_as_a_plan_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    for row in said(capsys, "list chips")["chips"]:
        plan = said(capsys, f"plan llama3-test --chips {row['as']} --length 128")
        assert plan["answer"]["usable_bytes"] == row["bytes"]


@pytest.mark.parametrize(("preset", "model"), list(cases()))
def test_the_dims_are_those_of_the_plan(preset: str, model: str) -> None:
    plan: Plan = make(preset, model)
    for tensor in plan.tensors:
        specs = [spec for spec in (tensor.at_rest, tensor.in_use) if spec is not None]
        sharded = {(axis, dim.logical_axis) for dim in specs[0].dims for axis in dim.axes if plan.mesh.size(axis) > 1}
        why = list(reasons(plan, tensor))
        assert {(reason.axis, reason.dim) for reason in why if reason.dim is not None} == sharded, tensor.name
        assert [reason.axis for reason in why] == [axis for axis, size in plan.mesh.shape.items() if size > 1]
        assert all(reason.why for reason in why)


def test_a_tensor_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    line = "explain mixtral-8x7b layers.moe.gate --layout ep --mesh fsdp=2,expert=4"
    fsdp, expert = said(capsys, line)["axes"]
    assert (fsdp["dim"], fsdp["where"]) == ("embed", "ep.yaml:7:3")
    assert (expert["dim"], expert["role"]) == ("experts", "expert")
    main(line.split())
    assert "embed, the first of embed, mlp that it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain llama3-8b layers.atention.q", "llama3-8b has no tensor 'layers.atention.q'. Did you mean 'layers.attention.q'?"),
        ("explain llama3-9b layers.attention.q", "no model 'llama3-9b'"),
        ("explain SW999", "'SW999' is no code of a finding"),
        ("explain llama3-8b", "llama3-8b is a model: of which tensor? Give its name, as llama3-8b "),
        ("list model", "'model' is none of models, layouts"),
    ],
)  # fmt: skip
def test_bad_input(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())
