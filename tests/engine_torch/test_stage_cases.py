"""The cases of stages on PyTorch cover what they should, and the page has each of them."""

from __future__ import annotations

from tests.engine_torch.staged import plan_in_stages
from tests.engine_torch.test_stages import CASES
from tests.engine_torch.whole import PAGE
from tests.engine_torch.whole_stages import TITLE, name_of
from tests.sameness.cases import LLAMA3, MODELS
from tests.sameness.page import section_of


def test_the_cases_cover_every_kind_of_stages() -> None:
    assert {case.model for case in CASES} == set(MODELS)
    assert {case.microbatches for case in CASES} == {*range(1, 9)}
    assert {letter for case in CASES for letter in ("embedding", "logits") if letter in case.ends} == {
        "embedding",
        "logits",
    }
    schedules = {"gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"}
    assert {case.schedule for case in CASES} == schedules
    for model in MODELS:
        own = [case for case in CASES if case.model == model]
        pipelines = [pipeline for case in own if (pipeline := plan_in_stages(case).pipeline) is not None]
        assert len(pipelines) == len(own)
        assert {one.choice.ranks for one in pipelines} == {2, 3, 4}
        assert {one.choice.virtual for one in pipelines} >= {1, 2}
        assert any(len({len(each.stage.layers) for each in one.stages}) > 1 for one in pipelines)
        beside = {case.inside for case in own}
        assert beside & {"tp", "ep-tp"}
        assert "cp" in beside
        assert model == LLAMA3 or {"ep", "ep-as-cp"} & beside


def test_the_page_has_every_case() -> None:
    section = section_of(PAGE.read_text(encoding="utf-8"), TITLE) or ""
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert [row.startswith(name_of(case)) for row, case in zip(rows, CASES, strict=True)] == [True] * len(CASES)
