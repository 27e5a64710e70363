"""Recipes of low precision, sharded updates and wide dtypes in stages: after some steps all that a run keeps has the bits of a run
without stages.

Both make the same products of the same operands, and sum in the same order: so codes, scales, random numbers, amaxes and their
histories must be the same, and with them every weight. Nothing is clipped, since the sum of squares over stages has another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from tests.engine_jax.steps import OPTIONS, batches_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled
from tests.engine_torch.staged import Staged, plan_in_stages, plan_without_stages
from tests.engine_torch.training import kept_after
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

SMALL = "num_layers=2,embed=64,mlp=128,num_heads=4,num_kv_heads=4"
UNCLIPPED = replace(OPTIONS, clip=1e9)
STEPS = 2
"""Factors of delayed amaxes follow from the first step in the second one."""

LAST_BITS = 1e-6

FSDP = Staged(model=LLAMA3, mesh="stage=2,fsdp=2", schedule="1f1b", microbatches=4)
TP = replace(FSDP, mesh="stage=2,fsdp=1,tensor=2", inside="tp", stages="E|t|t|L")
EP = replace(FSDP, model=MIXTRAL, mesh="stage=2,fsdp=1,expert=2", inside="ep")
EP_AS_CP = replace(EP, inside="ep-as-cp")
ZERO2 = replace(FSDP, mesh="stage=2,data=2,fsdp=1", inside="zero2")
CASES = (
    replace(FSDP, recipe="fp8-delayed", mesh="stage=2,fsdp=1", microbatches=2, settings=SMALL),
    # Halves that compute layers again, and random numbers by the row of a microbatch.
    replace(TP, recipe="nvfp4", schedule="zero-bubble", microbatches=2, settings=SMALL),
    # A tied weight is on two stages: each has the other's part of its scattered gradient.
    replace(ZERO2, microbatches=2, settings=f"{SMALL},tied=true", wide=True),
    replace(ZERO2, schedule="interleaved", stages="E|t|t|L", remat="dots", rows=16, mesh="stage=2,data=2,fsdp=2"),
    replace(FSDP, wide=True, schedule="zbv", stages="E|t|t|L", mesh="stage=2,data=2", inside="replicas"),
    replace(FSDP, wide=True, schedule="zero-bubble", settings="tied=true", mesh="stage=2,data=2", inside="replicas"),
    replace(FSDP, recipe="fp8-delayed", settings=SMALL),
    replace(EP, recipe="fp8-delayed", schedule="interleaved", stages="E|t|t|L"),
    replace(EP_AS_CP, recipe="fp8-current", microbatches=2),
    replace(TP, recipe="fp8-current", schedule="zbv"),
    replace(TP, recipe="mxfp8", schedule="dualpipev", remat="none"),
    replace(FSDP, recipe="mxfp8", schedule="gpipe", microbatches=1, remat="none"),
    replace(EP_AS_CP, model=DEEPSEEK3, recipe="fp8-block", stages="Et|ttL"),
    replace(TP, model=DEEPSEEK3, recipe="fp8-delayed", schedule="zbv", stages="Et|t|t|L"),
    replace(EP, model=DEEPSEEK3, recipe="nvfp4", microbatches=2, stages="Et|ttL"),
)


@pytest.mark.parametrize("case", some(CASES, (0, 1, 2)), ids=str)
def test_stages_change_no_bit(case: Staged, eight: Ranks) -> None:
    (ours, before), (theirs, _) = (after_steps(plan, case, eight) for plan in both(case))
    assert ours.keys() == theirs.keys()
    differ = {name for name in theirs if not np.array_equal(ours[name], theirs[name])}
    # Of a tied weight each stage sums its own use over microbatches first.
    tied = {name for name in theirs if "tied" in case.settings and name.endswith("embedding.tokens")}
    assert differ <= tied
    for name in differ:
        assert np.linalg.norm(ours[name] - theirs[name]) <= LAST_BITS * np.linalg.norm(theirs[name]), name
    kept = [name for name in theirs if name.startswith("delayed.")]
    assert bool(kept) == (case.recipe == "fp8-delayed")
    assert all(not np.array_equal(before[name], theirs[name]) for name in kept)


def both(case: Staged) -> tuple[Plan, Plan]:
    return plan_in_stages(case), plan_without_stages(case)


def after_steps(plan: Plan, case: Staged, eight: Ranks) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The state after the steps, and that before them."""
    batches = [dict(batch) for batch in batches_of(case.alone, STEPS)]
    ranks = eight.first(plan.mesh.num_devices).run(kept_after, plan, case.alone.seed, UNCLIPPED, batches)
    return assembled([after for _, after in ranks]), assembled([before for before, _ in ranks])


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_all_stages_together_reduce_and_keep_what_a_model_without_stages_does(recipe: str) -> None:
    """The same devices agree on the same amaxes as often, and each layer's history is on one stage."""
    case = replace(EP, recipe=recipe, settings="num_layers=2", stages="Et|tL")
    ours, theirs = both(case)
    assert amaxes([*ours.stage_plans], ours.request.microbatches) == amaxes([theirs], 1)
    assert sum(one.memory.amax_history_bytes for one in ours.stage_plans) == theirs.memory.amax_history_bytes
    assert {one.name: (one.shape, str(one.spec)) for one in ours.delayed_tensors}.keys() == {
        one.name for one in theirs.delayed_tensors
    }


def test_patterns_of_a_recipe_are_those_of_the_model() -> None:
    """A stage has no weight of some patterns, which is no mistake of the user's."""
    request = plan_without_stages(replace(EP, model=DEEPSEEK3, recipe="mxfp8")).request
    recipe = replace(preset("mxfp8"), high=("dense_layers.*", "moe_layers.attention.*"), quantized=("logits.*",))
    staged = plan_in_stages(replace(EP, model=DEEPSEEK3, stages="Et|ttL")).request
    alone, ours = (make_plan(replace(one, precision=recipe)) for one in (request, staged))
    found = [{weight.name: weight.num for weight in one.quantized} for one in ours.stage_plans]
    assert {name: sum(one.get(name, 0) for one in found) for name in {*found[0], *found[1]}} == {
        weight.name: weight.num for weight in alone.quantized
    }
    assert "logits.kernel" in found[1]


def amaxes(plans: list[Plan], microbatches: int) -> dict[tuple[object, ...], int]:
    """How many amaxes are reduced in a step, by component, phase and axes."""
    found: dict[tuple[object, ...], int] = {}
    for plan in plans:
        for one in plan.collectives:
            if one.dtype == "int32":
                times = 1 if one.phase == "update" else microbatches
                key = (one.component if one.phase != "update" else "", one.phase, one.axes)
                found[key] = found.get(key, 0) + one.bytes_per_device * one.count_per_step * times
    assert found
    return found
