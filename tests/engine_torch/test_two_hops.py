"""Tokens that go to their experts by way of nodes, compared with one rank: numbers, and what each rank sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, assert_trains_as, in_words
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, MIXTRAL, case

ON_FOUR = [
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=2,expert=2"),
    case(MIXTRAL, "ep-nodes", "fsdp=1,node=2,expert=2", settings="capacity_factor=1.0"),
    case(MIXTRAL, "ep-nodes-as-cp", "fsdp=1,node=2,expert=2", settings="capacity_factor=0.5", balanced=True),
    case(DEEPSEEK3, "ep-nodes-as-cp", "fsdp=1,node=2,expert=2", settings="top_k=2,num_groups=8,num_chosen_groups=3"),
]
ON_EIGHT = [
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=4,expert=2"),
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=2,expert=4", settings="capacity_factor=1.0"),
    case(MIXTRAL, "ep-nodes-tp", "node=2,expert=2,tensor=2"),
    case(DEEPSEEK3, "ep-nodes", "fsdp=2,node=2,expert=2", settings="top_k=8,num_groups=1,num_chosen_groups=1"),
]


@pytest.mark.parametrize("case", some(ON_FOUR, (0, 2)), ids=in_words)
def test_four_ranks_train_as_one_device(case: Case, four: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), four, case)


@pytest.mark.parametrize("case", some(ON_EIGHT, (0,)), ids=in_words)
def test_eight_ranks_train_as_one_device(case: Case, eight: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), eight, case)
