"""Law 3 in bfloat16, on PyTorch: layouts against one device, within the differences of other orders of summation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwright.core.planning import make_plan
from shardwright.core.policies.policy import BASES
from shardwright.core.resolution.request import Request
from tests.engine_jax.steps import Run
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.matrix import some
from tests.sameness.bounds import Bound, assert_within, bounded
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL
from tests.sameness.other_order import Here
from tests.sameness.test_bfloat16 import BATCHES, MASTER, NARROW, SEED, SUMMED, Case, request_of

CASES = (
    Case(model=LLAMA3, layout="heads and words", more="tied=true", options=(("microbatches", 2),)),
    Case(model=LLAMA3, layout="cp", move=(("move_attention", "ring"),), sizes=(("fsdp", 2), ("context", 2))),
    Case(model=LLAMA3, layout="hsdp", sizes=(("data", 2), ("fsdp", 2)), options=NARROW),
    Case(model=LLAMA3, layout="zero1", options=SUMMED),
    Case(model=LLAMA3, layout="zero2", options=(*MASTER, ("microbatches", 2))),
    Case(model=MIXTRAL, layout="ep", move=(("move_moe", "ring"),), sizes=(("fsdp", 2), ("expert", 2))),
    Case(model=DEEPSEEK3, layout="ep-as-cp", move=(("move_attention", "ulysses"),), sizes=(("fsdp", 2), ("expert", 2))),
    Case(model=MIXTRAL, layout="ep", sizes=(("fsdp", 2), ("expert", 2)), options=MASTER),
    Case(model=DEEPSEEK3, layout="ep-as-cp", sizes=(("fsdp", 2), ("expert", 2)), options=MASTER),
)


POLICIES = {
    LLAMA3: "keep=attention.attended,mlp.hidden,host=residual.stream,attention.keys@:1+keep=residual.middle,mlp.up",
    MIXTRAL: "keep=router.returned,moe.gate,attention.projected,host=residual.stream@:1+dots,recompute=attention.queries",
}
"""Of single activations, by models."""


@cache
def one_device(alone: Case) -> tuple[Run, Bound]:
    return bounded(request_of(alone), BATCHES, SEED)


def of_torch(request: Request) -> Request:
    return replace(request, engine="torch")


@pytest.mark.parametrize("case", some(CASES, {0, 1, 2, 4, 5, 6}), ids=str)
def test_a_layout_is_as_one_device(case: Case, four: Ranks) -> None:
    plan = make_plan(of_torch(request_of(case)))
    assert not plan.errors, plan.errors
    alone, bound = one_device(case.alone)
    assert_within(bound, trained_on(four, plan, BATCHES, SEED).run, alone)


@pytest.mark.parametrize("model", [LLAMA3, MIXTRAL])
def test_recomputed_values_are_bitwise_equal(model: str) -> None:
    """The same operations on the same numbers, in the same order."""
    request = of_torch(request_of(Case(model=model, layout="fsdp", sizes=(("fsdp", 1),))))
    policies = (*BASES, POLICIES[model])
    full, *others = (
        trained_on(Here(), make_plan(replace(request, remat=remat)), BATCHES, SEED).run for remat in policies
    )
    for other in others:
        np.testing.assert_array_equal(other.losses, full.losses)
        for ours, theirs in zip(other.gradients, full.gradients, strict=True):
            for name, array in theirs.items():
                np.testing.assert_array_equal(ours[name], array, err_msg=name)
