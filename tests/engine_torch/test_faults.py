"""Faults put into a step on purpose, each of which the comparison with one device must detect; and the same without a fault.

The model is one layer of a small Llama on four ranks, trained for the two steps whose gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwright.core.plan.plan import Plan
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.steps import Case, Run, assert_same
from tests.engine_torch import faults
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.redistributing import MESH
from tests.engine_torch.runs import torch_plan, trained_on
from tests.sameness.cases import LLAMA3, MICROBATCHES

SMALL = "num_layers=1,embed=64,mlp=128,num_heads=4,num_kv_heads=4"


def small(layout: str, mesh: str) -> Case:
    return Case(model=LLAMA3, layout=layout, mesh=mesh, microbatches=MICROBATCHES, settings=SMALL)


HYBRID = small("hsdp", "data=2,fsdp=2")
TENSOR = small("fsdp-tp", "fsdp=2,tensor=2")
CONTEXT = small("cp", "fsdp=2,context=2")
REPLICAS = small("ddp", "data=4")


def two_steps(ranks: Ranks, plan: Plan, fault: str = "") -> Run:
    """Two steps, without a check that ranks agree."""
    batches = [tokens_of(number, 8) for number in range(2)]
    return trained_on(ranks, plan, batches, seed=0, fault=fault, checked=False).run


@pytest.fixture(scope="module")
def alone(one: Ranks) -> Run:
    return two_steps(one, torch_plan(HYBRID.alone))


@pytest.mark.parametrize("case", [HYBRID, TENSOR, CONTEXT, REPLICAS], ids=str)
def test_without_a_fault_nothing_is_detected(case: Case, four: Ranks, alone: Run) -> None:
    assert_same(two_steps(four, torch_plan(case)), alone, case.tolerance)


OF_THE_ENGINE = [
    (HYBRID, faults.replicas_not_summed),
    (REPLICAS, faults.late_sums_left_out),
    (REPLICAS, faults.late_sums_made_twice),
    (TENSOR, faults.late_sums_left_out),
    (HYBRID, faults.gradients_averaged),
    (HYBRID, faults.microbatches_divided_twice),
    (HYBRID, faults.loss_normalised_by_each_rank),
    (HYBRID, faults.a_replica_dropped),
]


@pytest.mark.parametrize(
    ("case", "fault"), OF_THE_ENGINE, ids=[f"{case.layout} {fault.__name__}" for case, fault in OF_THE_ENGINE]
)
def test_a_fault_of_the_engine_is_detected(
    case: Case, fault: Callable[[pytest.MonkeyPatch], None], four: Ranks, alone: Run
) -> None:
    with pytest.raises(AssertionError, match="off by"):
        assert_same(two_steps(four, torch_plan(case), fault.__name__), alone, case.tolerance)


MOVES = [
    (TENSOR, "residual.stream", "attention.input", "feeds"),
    (TENSOR, "residual.stream", "logits.input", "feeds"),
    (TENSOR, "attention.projected", "residual.stream", "summed"),
    (TENSOR, "embedding.output", "residual.stream", "summed"),
    (CONTEXT, "attention.keys", "attention.keys_attended", "feeds"),
]


@pytest.mark.parametrize(
    ("case", "source", "target", "sum_of"), MOVES, ids=[f"{sum_of} of {s} to {t}" for _, s, t, sum_of in MOVES]
)
def test_a_missing_sum_of_activations_is_detected(
    case: Case, source: str, target: str, sum_of: str, four: Ranks, alone: Run
) -> None:
    plan = torch_plan(case)
    table = plan.request.table
    (move,) = (move for move in table.moves if (move.source, move.target) == (source, target))
    assert getattr(move, sum_of)
    none: dict[str, tuple] = {sum_of: ()}
    moves = tuple(replace(move, **none) if each is move else each for each in table.moves)
    wrong = replace(plan, request=replace(plan.request, table=replace(table, moves=moves)))
    with pytest.raises(AssertionError, match="off by"):
        assert_same(two_steps(four, wrong), alone, case.tolerance)


def test_a_missing_reduction_is_detected(four: Ranks, alone: Run) -> None:
    """The norm of a layer is replicated over tensor, and its gradient is partial over it."""
    plan = torch_plan(TENSOR)
    row = plan.by_name["layers.residual.feed_forward_norm"]
    assert row.gradient["tensor"] == "all-reduce"
    left = replace(row, gradient={axis: kind for axis, kind in row.gradient.items() if axis != "tensor"})
    wrong = replace(plan, tensors=tuple(left if tensor is row else tensor for tensor in plan.tensors))
    with pytest.raises(AssertionError, match=r"feed_forward_norm.*off by"):
        assert_same(two_steps(four, wrong), alone, TENSOR.tolerance)


@pytest.mark.parametrize("fault", [faults.axes_in_mesh_order, faults.shards_in_the_order_of_the_group])
def test_a_wrong_order_of_axes_is_detected(fault: Callable[[pytest.MonkeyPatch], None], four: Ranks) -> None:
    for wrong in four.run(faults.wrong_after_steps_with, fault.__name__, MESH, range(150)):
        assert wrong
