"""What is wrong with stages, each with a fix: the fix that a finding names is planned, and the finding is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.reading import read_layout
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.files import parse_yaml

BASE = sw.Request(
    layout=sw.load_layout("pp"),
    table=sw.model_table("llama3-test"),
    batch=32,
    length=64,
    mesh_sizes={"stage": 4, "data": 1, "fsdp": 2},
    devices=8,
    microbatches=8,
    engine="torch",
)


def of(code: str, **changes) -> list[Finding]:
    return [one for one in sw.make_plan(replace(BASE, **changes)).findings if one.code == code]


@pytest.mark.parametrize(
    ("code", "changes", "found", "fix", "mended"),
    [
        (
            "SW110",
            {"microbatches": 4, "schedule": "dualpipev"},
            "4 microbatches for schedule 'dualpipev' with 8 stages on 4 ranks",
            "--microbatches 8",
            {"microbatches": 8, "schedule": "dualpipev"},
        ),
        (
            "SW110",
            {"microbatches": 9, "batch": 36, "schedule": "interleaved"},
            "9 microbatches for schedule 'interleaved' on 4 ranks",
            "--batch 20 --microbatches 10",
            {"microbatches": 10, "batch": 20, "schedule": "interleaved"},
        ),
        (
            "SW108",
            {"batch": 24},
            "24 rows over fsdp 2, in 8 microbatches: 16 chunks",
            "--batch 32",
            {"batch": 32},
        ),
        (
            "SW110",
            {"mesh_sizes": {"stage": 16, "data": 1, "fsdp": 1}, "devices": 16, "microbatches": 16},
            "16 stages, 1 stage a rank, for 8 units: the embedding, 6 layers and the logits",
            "--mesh stage=8,data=1,fsdp=2",
            {"mesh_sizes": {"stage": 8, "data": 1, "fsdp": 2}, "devices": 16, "microbatches": 16},
        ),
        (
            "SW110",
            {"stages": "Et|tt|tt|t"},
            "--stages has the embedding and 6 layers",
            "leave --stages out",
            {},
        ),
        (
            "SW110",
            {"stages": "Et|tt|ttt|L|"},
            "5 stages in --stages on 4 ranks",
            "leave --stages out",
            {},
        ),
    ],
)
def test_the_fix_of_a_finding_is_one(code: str, changes: dict, found: str, fix: str, mended: dict):
    wrong = [one for one in of(code, **changes) if one.severity == "error"]
    assert [(one.found, one.fix) for one in wrong][:1] == [(found, fix)]
    assert not [one for one in of(code, **mended) if one.severity != "info"]


def test_weights_stay_gathered_under_a_divided_backward_pass():
    """The bytes are those that the plan's memory has, and other schedules do not."""
    plan = sw.make_plan(replace(BASE, schedule="zbv"))
    [found] = [one for one in plan.findings if one.code == "SW110"]
    assert plan.pipeline is not None
    assert found.severity == "info"
    assert found.found == (
        "schedule 'zbv' divides the backward pass: weights of a stage stay gathered, and their gradients unsharded, until the end of a step"
    )
    most = max(sum(stage.gathered_bytes for stage in plan.pipeline.of_rank(rank)) for rank in range(4))
    # Weights in float32 and their gradients: twice what all shards of the fullest rank are.
    held = [sum(2 * 2 * stage.weights_bytes for stage in plan.pipeline.of_rank(rank)) for rank in range(4)]
    assert most == pytest.approx(max(held), rel=0.02)
    assert f"{most / 2**20:.1f} MiB on a device" in found.cost
    assert not of("SW110", schedule="1f1b")
    assert not of("SW110", schedule="zbv", mesh_sizes={"stage": 8, "data": 1, "fsdp": 1}, microbatches=16, batch=32)[1:]


@pytest.mark.parametrize("text", ["", "Et|tx", "Et(t", "E*0t", "m|t", "Et||L", "|", "Et*99999999999|L", "é", "Et*-1"])
def test_stages_that_are_no_stages_are_one_error(text: str):
    found = ""
    try:
        plan = sw.make_plan(replace(BASE, stages=text))
        assert {one.code for one in plan.errors} == {"SW110"}
        assert plan.pipeline is None
    except InputError as error:
        found = str(error)
    assert not found or found.startswith("stages: column ")


TWO_AXES = """
name: two
mesh: {stage: 2, pipe: 2, fsdp: auto}
roles:
  stage: %s
  pipe:  %s
  fsdp:  fsdp
"""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (
            "{elsewhere: stage, virtual: 1}",
            "{elsewhere: stage, virtual: 2}",
            "virtual 1 on 'stage' and virtual 2 on 'pipe'",
        ),
        (
            "{elsewhere: stage, schedule: 1f1b}",
            "{elsewhere: stage, schedule: gpipe}",
            "schedule 1f1b on 'stage' and schedule gpipe on 'pipe'",
        ),
    ],
)
def test_two_axes_of_one_pipeline_have_one_schedule(first: str, second: str, found: str) -> None:
    def errors(*entries: str) -> list[tuple[str, str | None]]:
        layout = read_layout(parse_yaml(TWO_AXES % entries, "two.yaml"))
        return [(one.found, one.fix) for one in of("SW110", layout=layout, mesh_sizes={}) if one.severity == "error"]

    assert errors(first, second) == [(f"{found}: the axes are one pipeline", "pipe: stage under 'roles'")]
    assert errors(first, first) == errors(first, "stage") == errors("stage", second) == []


def test_two_things_that_jax_does_not_run_have_a_fix_each() -> None:
    """Each fix removes its own finding, though the other one stays."""
    wrong = of("SW415", engine="jax", schedule="gpipe", remat="host=residual.stream")
    assert [(one.where, one.fix) for one in wrong] == [
        ("schedule in stages of layout 'pp'", "--schedule circular"),
        ("--remat in stages of layout 'pp'", "--remat none"),
    ]


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"circular"}))
def test_each_schedule_that_jax_does_not_run_is_planned_and_reported(schedule: str, microbatches: int) -> None:
    given = {"engine": "jax", "schedule": schedule, "microbatches": microbatches}
    unstaged = [one for one in of("SW110", **given) if one.severity == "error"]
    # Where the schedule can have no stages, SW110 alone reports that.
    expected = [] if unstaged else [f"schedule '{schedule}', which the JAX engine does not run"]
    assert [one.found for one in of("SW415", **given)] == expected
