"""Steps after which a run cannot go on, and the message that says what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.planning import make_plan
from shardwright.runs.metrics.records import RunError, StepMetrics, record_of, require_sound
from shardwright.training.options import RunOptions
from tests.runs.counting import plan_of

OPTIONS = RunOptions(steps=3, out=Path("out"), lr=0.5, warmup=1)


def test_a_step_whose_assignments_exceeded_a_buffer_is_refused() -> None:
    metrics = StepMetrics(loss=7.5, grad_norm=1.0, tokens=96, dropped=0, overflow=1234)
    plan = make_plan(replace(plan_of().request, expert_buffer=0.5))
    with pytest.raises(RunError) as error:
        require_sound(2, metrics, OPTIONS, plan)
    assert str(error.value) == (
        "step 2: 1,234 token-expert assignments exceeded the capacity of a device's expert buffer, so this step was not "
        "the model's. It was not saved. Go on with --resume from the newest checkpoint, with a larger --expert-buffer "
        "(now 0.5) or without it."
    )
    assert error.value.exit_code == 1


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (7.5, math.inf)])
def test_a_step_that_is_not_finite_is_refused(loss: float, grad_norm: float) -> None:
    with pytest.raises(RunError) as error:
        require_sound(2, StepMetrics(loss=loss, grad_norm=grad_norm, tokens=96), OPTIONS, plan_of())
    assert str(error.value) == (
        f"step 2: the loss is {loss} and the gradient's norm {grad_norm}, and both must be finite. This step was not "
        "saved. Begin again with a lower --lr (now 0.5) or a longer --warmup (now 1), and another --out."
    )


def test_tokens_are_counted_by_the_second() -> None:
    metrics = StepMetrics(loss=7.5, grad_norm=1.0, tokens=96, dropped=4)
    require_sound(2, metrics, OPTIONS, plan_of())
    record = record_of(2, metrics, 0.5)
    assert (record.step, record.tokens_per_s, record.dropped) == (2, 192.0, 4)
