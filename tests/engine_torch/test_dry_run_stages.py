"""A dry run of stages: the collectives of a rank are the plan's to the byte, and the memory of each rank is near it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.core.planning import make_plan, routed_evenly
from shardwright.engine_torch.dry_run.dry_run import dry_run
from tests.engine_torch.staged import Staged, plan_in_stages
from tests.engine_torch.test_dry_run import is_unlisted
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

WHOLE = Staged(model=LLAMA3, mesh="stage=2,data=2,fsdp=2", microbatches=4, schedule="1f1b", inside="hsdp", rows=16)
CASES = (
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2,tensor=2", microbatches=4, schedule="zbv", stages="E|t|t|L", inside="tp"),
    replace(WHOLE, settings="tied=true"),
    WHOLE,
    Staged(model=LLAMA3, mesh="stage=2,fsdp=4", microbatches=2, schedule="zero-bubble", remat="none"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=4", microbatches=2, schedule="gpipe", remat="none"),
    Staged(model=LLAMA3, mesh="stage=2,fsdp=2", microbatches=4, schedule="interleaved", stages="E|t|t|L", remat="dots"),
    Staged(model=MIXTRAL, mesh="stage=2,fsdp=2,expert=2", microbatches=2, schedule="1f1b", inside="ep"),
    replace(WHOLE, mesh="stage=2,fsdp=2", inside="fsdp", ends="embedding: tensor, logits: tensor"),
    replace(WHOLE, settings="tied=true", ends="embedding: tensor, logits: tensor"),
    replace(WHOLE, mesh="stage=2,fsdp=2", inside="fsdp", schedule="zbv", stages="E|t|t|L", settings="tied=true"),
    replace(WHOLE, rows=32, ends="embedding: fsdp, logits: tensor"),
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        schedule="dualpipev",
        stages="Et|t|t|L",
        inside="ep-as-cp",
    ),
    # The last rank's stages are neighbours, and the backward pass is in halves that compute layers again.
    Staged(
        model=LLAMA3,
        mesh="stage=2,fsdp=2,tensor=2",
        microbatches=4,
        schedule="zbv",
        stages="E|t|t|L",
        inside="tp",
        recipe="fp8-current",
    ),
    Staged(
        model=MIXTRAL,
        mesh="stage=2,fsdp=2,expert=2",
        microbatches=2,
        schedule="1f1b",
        inside="ep",
        recipe="fp8-delayed",
    ),
    # A stage of several layers gathers what masks are made of once.
    Staged(
        model=DEEPSEEK3,
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=2,
        schedule="1f1b",
        stages="E|tttL",
        inside="ep-as-cp",
        remat="dots",
    ),
)


@pytest.mark.parametrize("case", some(CASES, (0, 1, 14)), ids=str)
def test_the_counted_collectives_are_those_of_the_plan(case: Staged) -> None:
    plan = plan_in_stages(case)
    found = dry_run(plan)
    expected: Counter[tuple[object, ...]] = Counter()
    for row in plan.collectives:
        expected[row.component, row.phase, row.kind, row.axes, row.bytes_per_device] += row.count_per_step
    counted: Counter[tuple[object, ...]] = Counter()
    for one, count in found.collectives:
        key = (one.component, one.phase, one.kind, one.axes, one.bytes_per_device)
        if key in expected or not is_unlisted(one):
            counted[key] += count
    assert counted == expected
    assert plan.pipeline is not None
    assert [one.rank for one in found.ranks] == list(range(plan.pipeline.choice.ranks))
    assert [one.planned_bytes for one in found.ranks] == [plan.pipeline.total_bytes(one.rank) for one in found.ranks]
    for one in found.ranks:
        # What is stored is exact. The activations of such small models are few.
        ends = [] if plan.ends_plan is None else [plan.ends_plan.memory]
        own = [*plan.pipeline.of_rank(one.rank), *ends]
        assert one.found.weights_bytes == sum(stage.weights_bytes for stage in own)
        assert one.found.gradients_bytes == sum(stage.gradients_bytes for stage in own)
        assert one.found.moments_bytes == sum(stage.optimizer_bytes for stage in own)
        assert 0.5 < one.found.peak_bytes / one.planned_bytes < 2


def test_beside_the_worst_case_of_routing_is_the_plan_with_as_many_rows_for_every_expert() -> None:
    case = Staged(model=MIXTRAL, mesh="stage=2,fsdp=2,expert=2", microbatches=2, schedule="1f1b", inside="ep")
    plan = plan_in_stages(case)
    even = make_plan(replace(plan.request, expert_buffer=1.0))
    assert plan.pipeline is not None
    assert even.pipeline is not None
    assert routed_evenly(plan).memory == even.memory
    for rank in range(2):
        assert routed_evenly(plan).pipeline.total_bytes(rank) == even.pipeline.total_bytes(rank)  # pyright: ignore[reportOptionalMemberAccess]
        assert even.pipeline.total_bytes(rank) < plan.pipeline.total_bytes(rank)
    assert routed_evenly(even) is even
    dense = plan_in_stages(WHOLE)
    assert routed_evenly(dense) is dense
