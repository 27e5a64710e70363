"""The cases of stages cover what they should, and the page has each of them."""

from __future__ import annotations

from shardwright.cli.typed.values import mesh_sizes
from tests.engine_jax.steps import layout_of, plan_of
from tests.sameness.cases import MODELS
from tests.sameness.page import PAGE, section_of
from tests.sameness.stage_cases import STAGED, TITLE


def test_the_cases_cover_every_kind_of_stages() -> None:
    assert {case.model for case in STAGED} == set(MODELS)
    assert {mesh_sizes(case.mesh)["stage"] for case in STAGED} == {2, 3, 4}
    assert {case.microbatches for case in STAGED} >= {1, 2, 4, 8}
    pipelines = [plan.pipeline for case in STAGED if (plan := plan_of(case))]
    assert {pipeline.choice.virtual for pipeline in pipelines if pipeline} == {1, 2}
    assert any(len({len(s.stage.layers) for s in pipeline.stages}) > 1 for pipeline in pipelines if pipeline)
    roles = {entry.roles[part] for case in STAGED for entry in layout_of(case).entries.values() for part in entry.roles}
    assert roles >= {"stage", "data", "fsdp", "tensor", "context", "expert"}


def test_the_page_has_every_case() -> None:
    section = section_of(PAGE.read_text(encoding="utf-8"), TITLE) or ""
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    names = [f"| {case.model} | {str(case).replace('|', '&#124;')} |" for case in STAGED]
    assert [row.startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * len(STAGED)
