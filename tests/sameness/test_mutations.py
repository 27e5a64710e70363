"""Faults put into a step on purpose, each of which the comparison with one device must detect.

The model is one layer of a small Llama on four devices, trained for the two steps whose gradients are compared. The program is
the engine's own, with one fault in a plan or in a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.model import ends
from tests.engine_jax.made_rows import LENGTH, Batch, head_tail, tokens_of
from tests.engine_jax.steps import Case, Run, assert_same, compile_plan, plan_of, run_plan
from tests.matrix import rest
from tests.sameness.cases import LLAMA3, MICROBATCHES

SMALL = "num_layers=1,embed=64,mlp=128,num_heads=4,num_kv_heads=4"


def small(layout: str, mesh: str, *, balanced: bool = False) -> Case:
    return Case(model=LLAMA3, layout=layout, mesh=mesh, microbatches=MICROBATCHES, settings=SMALL, balanced=balanced)


HYBRID = small("hsdp", "data=2,fsdp=2")
TENSOR = small("fsdp-tp", "fsdp=2,tensor=2")
CONTEXT = small("cp", "fsdp=2,context=2")
BALANCED = small("cp", "fsdp=2,context=2", balanced=True)
SOUND = [HYBRID, TENSOR, CONTEXT, rest(BALANCED)]


def two_steps(plan: Plan, change: Callable[[Batch], Batch] = lambda batch: batch) -> Run:
    """Both steps of a plan, without a check; ``change``: applied to the rows before."""
    return run_plan(plan, compile_plan(plan, level=0), [change(tokens_of(number, 8)) for number in range(2)], seed=0)


@pytest.fixture(scope="module")
def alone() -> Run:
    return two_steps(plan_of(HYBRID.alone))


def assert_detected(ours: Run, alone: Run, in_words: str = "off by") -> None:
    with pytest.raises(AssertionError, match=in_words):
        assert_same(ours, alone, HYBRID.tolerance)


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_without_a_fault_nothing_is_detected(case: Case, alone: Run) -> None:
    assert_same(two_steps(plan_of(case)), alone, case.tolerance)


def without_a_reduction(plan: Plan, weight: str, axis: str) -> Plan:
    """The plan without the reduction of a weight's gradient over an axis."""
    row = plan.by_name[weight]
    assert axis in row.gradient
    left = replace(row, gradient={other: kind for other, kind in row.gradient.items() if other != axis})
    return replace(plan, tensors=tuple(left if tensor is row else tensor for tensor in plan.tensors))


CELLS = [
    (HYBRID, "layers.mlp.down", "fsdp"),
    (HYBRID, "layers.residual.attention_norm", "fsdp"),
    (HYBRID, "embedding.tokens", "data"),
    (TENSOR, "layers.residual.feed_forward_norm", "tensor"),
    (CONTEXT, "layers.attention.k", "context"),
    (CONTEXT, "logits.kernel", "context"),
]


@pytest.mark.parametrize(
    ("case", "weight", "axis"),
    [CELLS[0], rest(*CELLS[1]), *CELLS[2:]],
    ids=[f"{weight} over {axis}" for _, weight, axis in CELLS],
)
def test_a_missing_reduction_is_detected(case: Case, weight: str, axis: str, alone: Run) -> None:
    assert_detected(two_steps(without_a_reduction(plan_of(case), weight, axis)), alone, weight)


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
    case: Case, source: str, target: str, sum_of: str, alone: Run
) -> None:
    plan = plan_of(case)
    table = plan.request.table
    (move,) = (move for move in table.moves if (move.source, move.target) == (source, target))
    assert getattr(move, sum_of)
    none: dict[str, tuple] = {sum_of: ()}
    moves = tuple(replace(move, **none) if each is move else each for each in table.moves)
    request = replace(plan.request, table=replace(table, moves=moves))
    assert_detected(two_steps(replace(plan, request=request)), alone)


def patch_loss(monkeypatch: pytest.MonkeyPatch, change: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """Make the loss of each device ``change(loss, valid_BL)``."""
    right = ends.summed_cross_entropy

    def wrong(logits_BLV: jax.Array, targets_BL: jax.Array, valid_BL: jax.Array, vocab: tuple[str, ...]) -> jax.Array:
        return change(right(logits_BLV, targets_BL, valid_BL, vocab), valid_BL)

    monkeypatch.setattr(ends, "summed_cross_entropy", wrong)


def test_a_loss_normalised_by_each_device_is_detected(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def normalised(loss: jax.Array, valid_BL: jax.Array) -> jax.Array:
        """The mean of the devices' means instead of the mean over all tokens."""
        axes = ("data", "fsdp")
        own = jnp.sum(valid_BL)
        return loss * jax.lax.psum(own, axes) / (jnp.maximum(own, 1) * jax.lax.axis_size(axes))

    patch_loss(monkeypatch, normalised)
    assert_detected(two_steps(plan_of(HYBRID)), alone)


def test_a_missing_gradient_of_a_replica_is_detected(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(loss: jax.Array, valid_BL: jax.Array) -> jax.Array:
        del valid_BL
        return jnp.where(jax.lax.axis_index("data") == 1, jax.lax.stop_gradient(loss), loss)

    patch_loss(monkeypatch, dropped)
    assert_detected(two_steps(plan_of(HYBRID)), alone)


def test_positions_in_another_order_than_their_tokens_are_detected(alone: Run) -> None:
    in_text = np.argsort(head_tail(LENGTH, 2))

    def positions_left_as_they_were(batch: Batch) -> Batch:
        return {**batch, "positions": batch["positions"][:, in_text]}

    assert_detected(two_steps(plan_of(BALANCED), positions_left_as_they_were), alone)
