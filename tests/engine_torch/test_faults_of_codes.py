"""Faults put on purpose into what sends tokens as codes and keeps weights as codes: the comparisons of ``test_dispatched_codes`` and
``test_resting_codes`` must detect each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine_jax.steps import OPTIONS, Case, Run, batches_of, compile_plan, in_row_order, plan_of, run_plan
from tests.engine_torch import faults_of_codes as faults
from tests.engine_torch.faults_of_codes import Patch
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled, torch_plan
from tests.engine_torch.test_dispatched_codes import assert_only_the_matrices_of_experts_differ, dispatching, sent
from tests.engine_torch.test_resting_codes import STEPS, planned, quantizing
from tests.engine_torch.training import kept_after
from tests.matrix import rest
from tests.sameness.cases import LLAMA3, MIXTRAL

TO_EXPERTS = dispatching(MIXTRAL, "ep", "fsdp=2,expert=2", "", "mxfp8")
HIGH_AT_LAST = dispatching(MIXTRAL, "ep", "fsdp=2,expert=2", "", "mxfp8 high_layers=1")
IN_A_RING = dispatching(MIXTRAL, "ep", "fsdp=2,expert=2", "moe=ring", "mxfp8")

OF_BOTH: list[tuple[Case, Patch]] = [
    (TO_EXPERTS, faults.tokens_sent_as_they_are),
    (TO_EXPERTS, faults.cotangents_sent_as_they_are),
    (TO_EXPERTS, faults.tokens_in_another_format),
    (HIGH_AT_LAST, faults.high_layers_read_codes),
    (IN_A_RING, faults.tokens_sent_as_they_are),
    (IN_A_RING, faults.cotangents_sent_as_they_are),
]
OF_PYTORCH: list[tuple[Case, Patch]] = [
    (TO_EXPERTS, faults.outputs_sent_back_as_codes),
    (TO_EXPERTS, faults.cotangents_of_tokens_sent_back_as_codes),
]


def pairs(every: list[tuple[Case, Patch]], kept: Collection[int]) -> list[Any]:
    """Those that ``make test`` runs, and the others with the marker ``matrix``."""
    return [one if number in kept else rest(*one) for number, one in enumerate(every)]


def ids(value: object) -> str:
    return getattr(value, "__name__", str(value))


def one_step(ranks: Ranks, case: Case, fault: str = "") -> Run:
    """As ``runs.trained_on``, without a check that ranks agree."""
    plan = torch_plan(case)
    function = partial(faults.train_with, fault) if fault else faults.train
    batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case, 1)]
    runs = ranks.run(function, plan, case.seed, OPTIONS, batches)
    return Run(
        losses=np.asarray([one.loss for one in runs[0].steps]),
        norms=np.asarray([one.grad_norm for one in runs[0].steps]),
        tokens=np.asarray([one.tokens for one in runs[0].steps]),
        gradients=tuple(assembled(boxes) for boxes in zip(*(one.gradients for one in runs), strict=True)),
    )


@pytest.mark.parametrize(("case", "fault"), pairs([*OF_BOTH, *OF_PYTORCH], (1,)), ids=ids)
def test_a_fault_of_what_is_sent_is_detected(case: Case, fault: Patch, four: Ranks) -> None:
    with pytest.raises(AssertionError):
        assert_only_the_matrices_of_experts_differ(one_step(four, case), one_step(four, sent(case), fault.__name__))


@pytest.mark.parametrize(("case", "fault"), pairs(OF_BOTH, ()), ids=ids)
def test_a_fault_of_what_jax_sends_is_detected(case: Case, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(case: Case) -> Run:
        plan = plan_of(case)
        return run_plan(plan, compile_plan(plan), batches_of(case, 1), case.seed)

    plain = step(case)
    fault(monkeypatch)
    # Functions of one name and the same arguments are traced once.
    jax.clear_caches()
    with pytest.raises(AssertionError):
        assert_only_the_matrices_of_experts_differ(plain, step(sent(case)))
    jax.clear_caches()


AT_REST: list[tuple[Case, Patch]] = [
    (quantizing(LLAMA3, "hsdp", "data=2,fsdp=2", "fp8-block"), faults.codes_not_made_again),
    (quantizing(LLAMA3, "hsdp", "data=2,fsdp=2", "fp8-current"), faults.amaxes_of_own_shards),
    (quantizing(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", "fp8-row"), faults.amaxes_of_own_shards),
    (quantizing(LLAMA3, "hsdp-zero1", "data=2,fsdp=2", "fp8-block"), faults.updated_parts_not_gathered),
]


@pytest.mark.parametrize(("case", "fault"), pairs(AT_REST, (0,)), ids=ids)
def test_a_fault_of_what_rests_is_detected(case: Case, fault: Patch, four: Ranks) -> None:
    def after(how: str, function: Callable[..., Any]) -> dict[str, np.ndarray]:
        plan = planned(case, how, "torch")
        batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case, STEPS)]
        return assembled([end for _, end in four.run(function, plan, case.seed, OPTIONS, batches)])

    gathered = after("gather_quantized", kept_after)
    rested = after("rest_quantized", partial(faults.kept_after_with, fault.__name__))
    assert gathered.keys() == rested.keys()
    assert any(not np.array_equal(array, rested[name]) for name, array in gathered.items())
