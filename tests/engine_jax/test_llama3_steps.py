"""Llama 3 under every layout: trained as on one device, its arrays sharded and its collectives and FLOPs as planned.

The comparison itself is tested with the faults that it must detect.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.cost.steps.flops import step_flops
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.places import assert_shardings_of_the_plan
from tests.engine_jax.program import Program, assert_steps_are_planned
from tests.engine_jax.steps import (
    Case,
    Gradients,
    Run,
    assert_same_gradients,
    assert_same_losses,
    assert_trains_as,
    compiled_step,
    plan_of,
    run_of,
    run_on,
)
from tests.matrix import rest, some
from tests.sameness.cases import FSDP_8, HSDP_2_4, HSDP_4_2, LLAMA3, covering

CASES = [
    # A second mesh of HSDP is trained by PyTorch too, and `tp` with a padded vocabulary.
    *some(covering(LLAMA3), (0, 1, 4)),
    # The six query heads of a device attend to two KV heads: four to one, two to the other. PyTorch trains this too.
    rest(Case(model=LLAMA3, layout="tp-whole-keys", mesh="fsdp=2,tensor=2", settings="num_heads=12,num_kv_heads=3")),
]
PLACED = [
    Case(model=LLAMA3, layout="ep", mesh="fsdp=2,expert=4"),
    Case(model=LLAMA3, layout="ep-as-cp", mesh="fsdp=2,expert=4"),
]
ALONE = covering(LLAMA3)[4].alone
"""One device, for the last of ``CASES`` that `make test` trains and for replicas."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_has_the_collectives_and_the_flops_of_the_plan(case: Case) -> None:
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))


def test_the_flops_of_fsdp_are_those_by_hand() -> None:
    """Three products for each weight that multiplies tokens, and those that a layer recomputes."""
    plan = plan_of(FSDP_8)
    table, tokens = plan.request.table, FSDP_8.rows * plan.request.length
    twice = sum(w.num_parameters for w in table.weights if len(w.shape) > 1 and w.name != "embedding.tokens")
    again = sum(w.num_parameters for w in table.weights if len(w.shape) > 1 and w.stack and not w.ends_layer)
    scores = 2 * tokens * plan.request.length * 2 * 16 * 16 * 4
    assert sum(step_flops(plan).values()) == (2 * tokens * (3 * twice + again) + 2 * scores) / 8


def test_replicas_are_all_reduced_once_for_all_microbatches() -> None:
    plan = plan_of(HSDP_4_2)
    moved = Program(compiled_step(HSDP_4_2).as_text()).collectives(plan.mesh)
    replicas = [one for one in moved if (one.kind, one.axes) == ("all-reduce", ("data",))]
    weights = sum(w.bytes_per_device * w.num for w in plan.weights if w.gradient.get("fsdp") == "reduce-scatter")
    assert sum(one.bytes_per_device * one.count_per_step for one in replicas) == weights


@pytest.mark.parametrize("hybrid", [HSDP_4_2, rest(HSDP_2_4)], ids=str)
def test_hybrid_shards_train_as_full_ones(hybrid: Case) -> None:
    assert_trains_as(hybrid, FSDP_8)


@pytest.mark.parametrize("case", [*CASES, *map(rest, PLACED)], ids=str)
def test_arrays_have_the_shardings_of_the_plan(case: Case) -> None:
    assert_shardings_of_the_plan(compiled_step(case), plan_of(case))


def test_other_shardings_are_detected() -> None:
    with pytest.raises(AssertionError, match="weights: embedding"):
        assert_shardings_of_the_plan(compiled_step(HSDP_4_2), plan_of(HSDP_2_4))


def test_other_collectives_are_detected() -> None:
    with pytest.raises(AssertionError, match="all-gather"):
        assert_steps_are_planned(compiled_step(HSDP_4_2).as_text(), plan_of(HSDP_2_4))


class Replicas:
    """Step 1 on eight replicas, each with the mean loss and gradient over the valid tokens of its own row."""

    def __init__(self) -> None:
        batch = tokens_of(0, 8)
        rows = np.arange(8)[:, None]
        runs = [run_on(ALONE, [{**batch, "valid": batch["valid"] & (rows == row)}]) for row in range(8)]
        self.losses = [run.losses[0] for run in runs]
        self.tokens = np.asarray([run.tokens[0] for run in runs])
        self.gradients = [run.gradients[0] for run in runs]
        self.weights = self.tokens / self.tokens.sum()

    def sum(self, weights: np.ndarray, only: str = "") -> Gradients:
        """The replicas' gradients, weighted by ``weights``; by the correct ones for tensors whose name does not contain ``only``."""
        return {
            name: sum(
                weight * gradient[name]
                for weight, gradient in zip(weights if only in name else self.weights, self.gradients, strict=True)
            )
            for name in self.gradients[0]
        }


@pytest.fixture(scope="module")
def replicas() -> Replicas:
    return Replicas()


def test_replicas_have_very_different_numbers_of_tokens_and_sum_to_the_step(replicas: Replicas) -> None:
    assert sorted(replicas.tokens) == [0, 2, 18, 24, 29, 30, 30, 31]
    assert_same_gradients(replicas.sum(replicas.weights), run_of(ALONE).gradients[0])


@pytest.mark.parametrize("tokens", [2, 31])
def test_a_dropped_replica_is_detected(replicas: Replicas, tokens: int) -> None:
    with pytest.raises(AssertionError, match="layer 0"):
        assert_same_gradients(
            replicas.sum(np.where(replicas.tokens == tokens, 0, replicas.weights)), run_of(ALONE).gradients[0]
        )


@pytest.mark.parametrize("name", ["attention_norm", "embedding.tokens", "mlp.down"])
def test_a_missing_reduction_of_one_weight_is_detected(replicas: Replicas, name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        assert_same_gradients(replicas.sum(np.eye(8)[0], only=name), run_of(ALONE).gradients[0])


def test_a_loss_normalized_by_each_replica_is_detected(replicas: Replicas) -> None:
    step = run_of(ALONE)
    with pytest.raises(AssertionError):
        assert_same_gradients(replicas.sum(np.full(8, 1 / 8)), step.gradients[0])
    theirs = Run(losses=step.losses[:1], norms=step.norms[:1], tokens=step.tokens[:1], gradients=())
    ours = Run(losses=np.asarray([np.mean(replicas.losses)]), norms=theirs.norms, tokens=theirs.tokens, gradients=())
    with pytest.raises(AssertionError):
        assert_same_losses(ours, theirs, ALONE.tolerance)
