"""Mixtral under every layout: trained as on one device, its arrays sharded and its collectives and FLOPs as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine_jax.places import assert_shardings_of_the_plan
from tests.engine_jax.program import assert_flops_are_the_model_s, assert_steps_are_planned
from tests.engine_jax.steps import STEPS, Case, assert_trains_as, compiled_step, plan_of
from tests.matrix import rest, some
from tests.sameness.cases import FEW_ROWS, MIXTRAL, case, covering
from tests.sameness.measure import assert_same_assignments

# PyTorch trains the others too, in `tests/engine_torch/test_layouts_agree.py` and `test_against_jax.py`.
IN_CHUNKS = replace(case(MIXTRAL, "tp-as-ep", "fsdp=2,tensor=4"), loss_chunks=8)
"""A vocabulary that axes shard, and the loss in chunks. `tp-as-ep` without chunks is one of the others."""
TRAINED = [*some(covering(MIXTRAL), (2, 3, 4)), IN_CHUNKS]
PLACED = [
    Case(model=MIXTRAL, layout="ddp", mesh="data=8"),
    Case(model=MIXTRAL, layout="tp", mesh="data=2,tensor=4"),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_step_has_the_collectives_and_the_flops_of_the_plan(case: Case) -> None:
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.matrix
def test_trains_as_one_device_to_the_last_step() -> None:
    """Differences do not accumulate over steps, and the loss falls."""
    ep_as_cp = case(
        MIXTRAL, "ep-as-cp", "fsdp=2,expert=4", settings="capacity_factor=1.0", rows=FEW_ROWS, balanced=True
    )
    assert_trains_as(ep_as_cp, ep_as_cp.alone, STEPS)


def test_tokens_are_assigned_as_on_one_device() -> None:
    assert_same_assignments(case(MIXTRAL, "ep", "fsdp=2,expert=2"))


@pytest.mark.parametrize("case", [*TRAINED, *map(rest, PLACED)], ids=str)
def test_arrays_have_the_shardings_of_the_plan(case: Case) -> None:
    assert_shardings_of_the_plan(compiled_step(case), plan_of(case))


def test_other_shardings_are_detected() -> None:
    ep, ep_as_cp = (case(MIXTRAL, layout, "fsdp=2,expert=2") for layout in ("ep", "ep-as-cp"))
    with pytest.raises(AssertionError, match="length/expert"):
        assert_shardings_of_the_plan(compiled_step(ep), plan_of(ep_as_cp))


def test_other_collectives_and_flops_are_detected() -> None:
    text = compiled_step(case(MIXTRAL, "ep", "fsdp=2,expert=2")).as_text()
    with pytest.raises(AssertionError, match="all-gather"):
        assert_steps_are_planned(text, plan_of(case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2")))
    with pytest.raises(AssertionError):
        assert_flops_are_the_model_s(text, plan_of(case(MIXTRAL, "ep", "fsdp=2,expert=2", rows=16)))
