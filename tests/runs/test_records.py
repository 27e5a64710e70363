"""Steps after which a run cannot go on, and the message that says what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import Request, load_layout, model_table
from shardwright.core.planning import make_plan
from shardwright.cost import read_machine
from shardwright.runs.metrics.rates import Rates, rates_of
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
        "(now 0.5) or without it: then buffers grow."
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


def test_tokens_and_flops_are_counted_by_the_second_and_device() -> None:
    metrics = StepMetrics(loss=7.5, grad_norm=1.0, tokens=96, dropped=4)
    require_sound(2, metrics, OPTIONS, plan_of())
    rates = Rates(devices=4, model_flops=8e12, peak_flops_per_s=1e13)
    record = record_of(2, metrics, 0.5, rates, lr=0.1, tokens_seen=192, peak_bytes=7, time_s=3.0)
    assert (record.step, record.tokens_per_s, record.dropped, record.lr) == (2, 192.0, 4, 0.1)
    assert (record.tokens_per_s_per_device, record.model_tflops_per_s_per_device, record.mfu) == (48.0, 4.0, 0.4)
    assert (record.tokens_seen, record.peak_bytes, record.time_s) == (192, 7, 3.0)


def test_model_flops_are_six_for_each_parameter_of_a_product_and_those_of_attention() -> None:
    """Against the formula of the papers, from the published sizes of Llama 3.1 8B: 6 N + 12 x layers x heads x head width x length."""
    request = Request(
        layout=load_layout("fsdp"),
        table=model_table("llama3-8b"),
        devices=8,
        batch=8,
        length=4096,
        chip=read_machine("h100:1x8").chip,
    )
    rates = rates_of(make_plan(request), "cpu")
    embedding = 128_256 * 4096
    parameters = 8_030_261_248 - embedding - (2 * 32 + 1) * 4096
    flops = (6 * parameters + 12 * 32 * 32 * 128 * 4096) * 8 * 4096
    assert rates.model_flops == pytest.approx(flops, rel=1e-12)
    assert rates.peak_flops_per_s == 989e12
    assert rates_of(make_plan(replace(request, chip=None)), "NVIDIA H200").peak_flops_per_s == 989e12
    assert rates_of(make_plan(replace(request, chip=None)), "another").mfu(1.0) is None
