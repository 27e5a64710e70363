"""The record of a step, and the check that a run may go on after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwright.core.findings.errors import ShardwrightError
from shardwright.core.plan.plan import Plan
from shardwright.runs.metrics.rates import Rates
from shardwright.training.options import RunOptions, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step: mean loss over valid tokens, global norm of the gradients before clipping, valid tokens.

    ``dropped``: token-expert assignments beyond the capacity of an expert. ``overflow``: assignments beyond the capacity of
    a buffer of the layout, in all layers; where it is not 0, the step is not the model's. ``grown_rows``: of a device's buffer of
    experts' tokens, where it grew for this step. All are of the global step, and equal in every process.
    """

    loss: float
    grad_norm: float
    tokens: int
    dropped: int = 0
    overflow: int = 0
    grown_rows: int | None = None


class RunError(ShardwrightError):
    """A run that has begun and cannot go on."""

    exit_code = 1


def record_of(
    number: int,
    metrics: StepMetrics,
    step_s: float,
    rates: Rates,
    *,
    lr: float,
    tokens_seen: int | None,
    peak_bytes: int | None,
    time_s: float,
) -> StepRecord:
    """The record of a step that took ``step_s`` seconds and ended at ``time_s``, in seconds since 1970."""
    return StepRecord(
        step=number,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        lr=lr,
        tokens=metrics.tokens,
        tokens_seen=tokens_seen,
        dropped=metrics.dropped,
        tokens_per_s=metrics.tokens / step_s,
        tokens_per_s_per_device=rates.tokens_per_s_per_device(metrics.tokens, step_s),
        model_tflops_per_s_per_device=rates.model_tflops_per_s_per_device(step_s),
        mfu=rates.mfu(step_s),
        peak_bytes=peak_bytes,
        step_s=step_s,
        time_s=time_s,
    )


def beside_plan(record: StepRecord, plan: Plan, measured_bytes: int | None) -> StepRecord:
    """The record of a run's last step with what was planned, where there is something to compare: a time, or the bytes of a device."""
    if plan.step is None and measured_bytes is None:
        return record
    return replace(
        record,
        planned_step_s=None if plan.step is None else plan.step.seconds,
        planned_bytes=plan.memory.total_bytes_per_device,
        measured_bytes=measured_bytes,
    )


def require_sound(number: int, metrics: StepMetrics, options: RunOptions, plan: Plan) -> None:
    """Raises RunError for a step that was not the model's, or whose numbers are not finite. The message says what to do."""
    if metrics.overflow:
        raise RunError(
            f"step {number}: {metrics.overflow:,} token-expert assignments exceeded the capacity of a device's expert buffer, "
            f"so this step was not the model's. It was not saved. Go on with --resume from the newest checkpoint, with "
            f"a larger --expert-buffer (now {plan.request.expert_buffer}) or without it: then buffers grow."
        )
    if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
        raise RunError(
            f"step {number}: the loss is {metrics.loss} and the gradient's norm {metrics.grad_norm}, and both must be "
            f"finite. This step was not saved. Begin again with a lower --lr (now {options.lr:g}) or a longer --warmup "
            f"(now {options.warmup}), and another --out."
        )
