"""The answer of a priced plan: does it fit, how fast is a step, how long and how dear is the training (``core/plan/answer.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.estimate.answer import Answer, Speed, Waiting, training_of
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.plan.plan import Memory, Plan
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.flops import TERA, model_flops
from shardwright.cost.steps.step import Times, seconds_of

PEAK = "bf16_flops_per_s"


def answer_of(plan: Plan, mapping: MeshMapping, times: Times, all_to_one: Memory) -> Answer:
    """``times``: of each collective of the plan, in its order. ``all_to_one``: what a device needs that gets all tokens that its experts may."""
    request, chip = plan.request, mapping.machine.chip
    speed = None if plan.step is None else _speed(plan, plan.step, mapping, times)
    tokens = request.training_tokens
    needed, most = (memory.total_bytes_per_device for memory in (plan.memory, all_to_one))
    return Answer(
        needed_bytes=needed,
        needed_bytes_if_one_device_gets_all=most if most > needed else None,
        usable_bytes=None if chip is None else chip.usable_bytes,
        speed=speed,
        training=None
        if tokens is None or speed is None
        else training_of(tokens, request.device_hour_price, speed, plan.mesh.num_devices),
    )


def _speed(plan: Plan, step: StepCost, mapping: MeshMapping, times: Times) -> Speed:
    numbers, devices = mapping.machine.numbers, plan.mesh.num_devices
    tokens_per_s = plan.request.batch * plan.request.length / step.seconds
    model = model_flops(plan.request) / step.seconds / devices
    has_peak = numbers is not None and PEAK in numbers.numbers
    return Speed(
        seconds=step.seconds,
        low_seconds=step.low_seconds,
        high_seconds=step.high_seconds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / devices,
        model_tflops_per_s_per_device=model / TERA,
        hardware_tflops_per_s_per_device=None
        if step.flops_per_device is None
        else step.flops_per_device / step.seconds / TERA,
        mfu=model / numbers.read(PEAK) if numbers is not None and has_peak else None,
        exposed_share=step.exposed_seconds / step.seconds,
        waiting=waiting(plan, mapping, times) if step.exposed_seconds else None,
    )


def waiting(plan: Plan, mapping: MeshMapping, times: Times) -> Waiting | None:
    """The kind, axes and component whose collectives take the longest in a step; None without collectives."""
    totals: dict[tuple[str, tuple[str, ...], str], float] = {}
    for planned, time in zip(plan.collectives, times, strict=True):
        where = planned.kind, planned.axes, planned.component
        totals[where] = totals.get(where, 0.0) + (seconds_of(planned, time) or 0.0)
    if not totals:
        return None
    (kind, axes, component), seconds = max(totals.items(), key=lambda item: item[1])
    network = _network(mapping, axes)
    return Waiting(kind=kind, axes=axes, component=component, network=network, seconds=seconds)


def _network(mapping: MeshMapping, axes: Sequence[str]) -> str:
    """Between which devices a group over axes sends: of one domain, or of several."""
    numbers = mapping.machine.numbers
    domain = "slice" if numbers is not None and numbers.network == "torus" else "node"
    return f"between {domain}s" if mapping.group(axes).domains > 1 else f"inside a {domain}"
