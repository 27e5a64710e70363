"""Copies of activations to the host in the time of a step, and the finding where making them again is faster.

The bytes are worked out by hand: rows x tokens x width x 2 bytes for each layer of a device.
"""

from __future__ import annotations

import pytest

from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.plan.plan import Plan
from tests.cost.plans import priced

GATE = 14336
"""The width of ``mlp.gate`` of llama3-8b, which has 32 layers."""
TOKENS = 4096
H100, V5P = 64e9, 16e9


def plan_of(remat: str, chips: str = "h100:8", **options: object) -> Plan:
    return priced(
        "llama3-8b",
        "fsdp",
        chips,
        mesh_sizes={"fsdp": 8},
        batch=16,
        length=TOKENS,
        dtype="bfloat16",
        remat=remat,
        **options,
    )


def step_of(plan: Plan) -> StepCost:
    assert plan.step is not None
    return plan.step


@pytest.mark.parametrize(("chips", "rate"), [("h100:8", H100), ("v5p:2x2x2", V5P)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_over_the_link_forth_and_back(chips: str, rate: float, microbatches: int) -> None:
    step = step_of(plan_of("host=mlp.gate", chips, microbatches=microbatches))
    assert step.host_seconds == pytest.approx(2 * (2 * TOKENS * GATE * 2 * 32) / rate)


def test_nothing_is_copied_without_a_policy_that_says_so() -> None:
    step = step_of(plan_of("keep=mlp.gate"))
    assert (step.host_seconds, step.host_exposed_seconds) == (0.0, 0.0)
    assert "host_seconds" not in step.to_json()


def test_copies_are_hidden_behind_the_passes_beside_them() -> None:
    """Half a second of passes hides 0.12 s each way; of v5p's slower link more remains than its passes hide."""
    hidden = step_of(plan_of("host=mlp.gate"))
    assert hidden.host_exposed_seconds == 0.0
    assert hidden.seconds == pytest.approx(hidden.compute_seconds + hidden.exposed_seconds + hidden.idle_seconds)
    none = step_of(plan_of("none", "v5p:2x2x2"))
    slow = step_of(plan_of("none,host=mlp.gate,mlp.up,mlp.hidden", "v5p:2x2x2"))
    one_way = 3 * 2 * TOKENS * GATE * 2 * 32 / V5P
    assert slow.host_seconds == pytest.approx(2 * one_way)
    # Both steps compute the same, and copy forth beside a third of it and back beside the rest.
    assert slow.seconds - none.seconds == pytest.approx(slow.host_exposed_seconds)
    assert 2 * one_way - slow.compute_seconds <= slow.host_exposed_seconds < 2 * one_way


def test_pytorch_waits_for_the_copies_back() -> None:
    step = step_of(plan_of("host=mlp.gate", engine="torch"))
    assert step.host_seconds is not None
    assert step.host_exposed_seconds == pytest.approx(step.host_seconds / 2)


def test_a_link_without_a_figure_has_no_time_and_says_so() -> None:
    plan = plan_of("host=mlp.gate", "tpu7x:2x2x1")
    assert step_of(plan).host_seconds is None
    assert step_of(plan).to_json()["host_seconds"] is None
    (found,) = [one for one in plan.findings if one.code == "SW205"]
    assert found.severity == "info"


def test_the_finding_has_both_steps_and_a_fix_with_the_shorter_one() -> None:
    plan = plan_of("none,host=mlp.gate,mlp.up", "v5p:2x2x2")
    (found,) = [one for one in plan.findings if one.code == "SW205"]
    assert found.fix == "--remat none,recompute=mlp.gate,mlp.up"
    again = plan_of("none,recompute=mlp.gate,mlp.up", "v5p:2x2x2")
    assert step_of(again).seconds < step_of(plan).seconds
    assert not [one for one in again.findings if one.code == "SW205"]


def test_the_input_of_layers_cannot_be_made_again() -> None:
    plan = plan_of("host=residual.stream", engine="torch")
    assert step_of(plan).host_exposed_seconds > 0
    assert not [one for one in plan.findings if one.code == "SW205"]


def test_stages_have_the_copies_in_their_passes() -> None:
    options = {"batch": 32, "length": TOKENS, "microbatches": 4, "dtype": "bfloat16"}
    sizes = {"stage": 2, "fsdp": 4}
    kept, hosted = (
        priced("llama3-8b", "pp", "v5p:2x2x2", mesh_sizes=sizes, remat=remat, **options)
        for remat in ("keep=mlp.gate,mlp.up", "host=mlp.gate,mlp.up")
    )
    assert step_of(hosted).host_exposed_seconds > 0
    assert step_of(hosted).seconds > step_of(kept).seconds
