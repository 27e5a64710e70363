"""The cases of stages cover what they should, and the page has each of them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.engine_jax.steps import Case, layout_of, plan_of
from tests.sameness.cases import LLAMA3, MODELS
from tests.sameness.page import PAGE, section_of
from tests.sameness.stage_cases import STAGED, TITLE


def test_the_cases_cover_every_kind_of_stages() -> None:
    assert {case.model for case in STAGED} == set(MODELS)
    assert {case.microbatches for case in STAGED} == {*range(1, 9)}
    for model in MODELS:
        own = [case for case in STAGED if case.model == model]
        pipelines = [pipeline for case in own if (pipeline := plan_of(case).pipeline) is not None]
        assert len(pipelines) == len(own)
        assert {one.choice.ranks for one in pipelines} == {2, 3, 4}
        assert {one.choice.virtual for one in pipelines} == {1, 2}
        assert any(len({len(each.stage.layers) for each in one.stages}) > 1 for one in pipelines)
        assert {letter for one in pipelines if one.shared for letter in one.shared.letters} >= {"L"}
        beside = {role for case in own for role in roles_beside(case)}
        assert beside >= {"fsdp", "tensor", "context"}
        assert model == LLAMA3 or beside >= {"expert", "ep-as-cp"}


def roles_beside(case: Case) -> Iterator[str]:
    """The roles of the other axes that have several devices."""
    mesh = plan_of(case).mesh
    for axis, entry in layout_of(case).entries.items():
        roles = {*entry.roles.values()}
        if axis in mesh.larger_than_one(mesh.names) and "stage" not in roles:
            yield (
                "ep-as-cp"
                if {"context", "expert"} <= roles
                else "expert"
                if "expert" in roles
                else entry.roles["residual"]
            )


def test_the_page_has_every_case() -> None:
    section = section_of(PAGE.read_text(encoding="utf-8"), TITLE) or ""
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    names = [f"| {case.model} | {str(case).replace('|', '&#124;')} |" for case in STAGED]
    assert [row.startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * len(STAGED)
