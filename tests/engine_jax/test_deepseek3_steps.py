"""DeepSeek-V3 under every layout: trained as on one device, its arrays sharded as planned."""

from __future__ import annotations

import pytest

from tests.engine_jax.places import assert_shardings_of_the_plan
from tests.engine_jax.steps import Case, assert_trains_as, compiled_step, plan_of
from tests.matrix import rest, some
from tests.sameness.cases import CP_2, DEEPSEEK3, EP_AS_CP_2, covering
from tests.sameness.measure import assert_same_assignments

# PyTorch trains the others too, in `tests/engine_torch/test_layouts_agree.py`.
TRAINED = some(covering(DEEPSEEK3), (0, 1))
PLACED = [
    Case(model=DEEPSEEK3, layout="hsdp", mesh="data=2,fsdp=4"),
    Case(model=DEEPSEEK3, layout="ddp", mesh="data=8"),
    Case(model=DEEPSEEK3, layout="tp", mesh="data=2,tensor=4"),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


def test_fsdp_2_with_cp_2_trains_as_fsdp_2_with_ep_as_cp_2() -> None:
    assert_trains_as(EP_AS_CP_2, CP_2)


# Mixtral's are compared in each `make test`.
@pytest.mark.matrix
def test_tokens_are_assigned_as_on_one_device() -> None:
    assert_same_assignments(EP_AS_CP_2)


@pytest.mark.parametrize("case", [*TRAINED, *map(rest, PLACED)], ids=str)
def test_arrays_have_the_shardings_of_the_plan(case: Case) -> None:
    assert_shardings_of_the_plan(compiled_step(case), plan_of(case))
