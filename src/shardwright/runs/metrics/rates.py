"""What a step's time means for each device: tokens, model FLOPs, and their share of the chip's peak. docs/metrics.md is its page."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.plan.plan import Plan
from shardwright.cost.hardware.device_names import chip_called, chip_of_device
from shardwright.cost.steps.flops import TERA, model_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """``model_flops``: of a step on all devices (``cost/steps/flops.py``). ``peak_flops_per_s``: of dense products of bfloat16 on one device; None where the chip is not known."""

    devices: int
    model_flops: float
    peak_flops_per_s: float | None

    def tokens_per_s_per_device(self, tokens: int, step_s: float) -> float:
        return tokens / step_s / self.devices

    def model_tflops_per_s_per_device(self, step_s: float) -> float:
        return self.model_flops / step_s / self.devices / TERA

    def mfu(self, step_s: float) -> float | None:
        """Model FLOPs utilisation: the share of the peak that the model's own FLOPs take."""
        if self.peak_flops_per_s is None:
            return None
        return self.model_tflops_per_s_per_device(step_s) * TERA / self.peak_flops_per_s


def rates_of(plan: Plan, device_name: str) -> Rates:
    """The rates of a plan's steps, on the chips of its request or else on devices of this name."""
    request = plan.request
    chip = chip_of_device(device_name) if request.chip is None else chip_called(request.chip.name)
    return Rates(
        devices=plan.mesh.num_devices,
        model_flops=model_flops(request),
        peak_flops_per_s=None if chip is None else chip.read("bf16_flops_per_s"),
    )
