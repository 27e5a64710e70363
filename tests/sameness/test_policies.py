"""Policies of recomputation: each trains as one device does, and its program has the collectives of its plan, on both engines."""

from __future__ import annotations

import pytest

from shardwright.cli.running.compile_torch import compile_by_dry_run
from shardwright.core.policies.policy import CHANGES, read_policy
from tests.engine_jax.program import assert_program_is_the_plan
from tests.engine_jax.steps import Case, assert_trains_as, compiled_step, plan_of
from tests.engine_torch.runs import torch_plan
from tests.matrix import some
from tests.sameness.cases import MODELS, policies
from tests.sameness.page import PAGE, section_of
from tests.sameness.random_policies import COUNT, SEED, TITLE, drawn

CASES = list(policies())


@pytest.mark.parametrize("case", some(CASES, (4, 8)), ids=str)
def test_a_policy_trains_as_one_device_and_as_planned(case: Case) -> None:
    text = compiled_step(case).as_text()
    assert text is not None
    assert_program_is_the_plan(text, plan_of(case))
    assert_trains_as(case, case.alone)


@pytest.mark.parametrize("case", some(CASES, (4, 8, 12)), ids=str)
def test_pytorch_has_the_collectives_of_the_plan(case: Case) -> None:
    """To the byte and to the number; beside them there are sums of single numbers, and those of the loss over the vocabulary."""
    rows = compile_by_dry_run(torch_plan(case)).agreement.rows
    assert not [row for row in rows if row.state == "unmatched"]
    planned = [row for row in rows if row.predicted_count]
    assert len(planned) >= 4
    assert all(
        (row.predicted_bytes, row.predicted_count) == (row.compiled_bytes, row.compiled_count) for row in planned
    )


def test_the_page_has_twenty_drawn_policies() -> None:
    found = section_of(PAGE.read_text(encoding="utf-8"), TITLE) or ""
    rows = [line for line in found.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == COUNT
    assert {row.split(" | ")[1] for row in rows} == {"jax", "torch"}


@pytest.mark.parametrize("number", range(4))
def test_a_drawn_policy_is_that_of_its_row(number: int) -> None:
    """What is drawn today is what was trained."""
    one = drawn(SEED, number)
    text = read_policy(one.plan.request.remat).text
    row = f"| {number} | {one.engine} | {one.family} | {one.plan.mesh} | `{text}` |"
    assert row in PAGE.read_text(encoding="utf-8")


def test_they_are_of_every_kind() -> None:
    parts = [part for case in CASES for part in read_policy(plan_of(case).request.remat).parts]
    assert {part.base for part in parts} == {"full", "dots", "none"}
    assert all(any(getattr(part, how) for part in parts) for how in CHANGES)
    assert any(part.layers is not None and part.layers.stack for part in parts)
    assert any(part.layers is not None and part.layers.stop for part in parts)
    assert {case.model for case in CASES} == set(MODELS)
