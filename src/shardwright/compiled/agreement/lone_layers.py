"""How much of a planned collective is of layers in a loop over one layer, or of weights outside the loops.

A compiler unrolls a loop of one iteration, and then sees that what is made of the same operands is made again: in the recomputation, or
in each microbatch.
"""

from __future__ import annotations

from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.quantization.products import layer_runs
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.quantization.reductions import AMAX_BYTES, AMAX_DTYPE, amax_reductions


def of_weights(plan: Plan, one: PlannedCollective) -> float:
    """The share of a row's executions that are of such weights: gathers of them, or the amaxes of their values."""
    if one.dtype == AMAX_DTYPE:
        return _of_amaxes(plan, one, of_weights_only=True)
    rows = [plan.by_name[name] for name in one.tensors]
    single = sum(_loops_of_one(plan, row.stack, row.num) for row in rows if row.kind == "weight")
    return min(1.0, single * plan.request.microbatches / one.count_per_step)


def of_all(plan: Plan, one: PlannedCollective) -> float:
    """The share of a row of activations, or of amaxes of any operand, that is of such layers."""
    if one.dtype == AMAX_DTYPE:
        return _of_amaxes(plan, one, of_weights_only=False)
    rows = [plan.by_name[name] for name in one.tensors]
    if not rows or any(row.kind == "weight" for row in rows):
        return 0.0
    layers = {weight.stack: weight.num for weight in plan.weights if weight.stack is not None}
    return sum(_loops_of_one(plan, stack, num) for stack, num in layers.items()) / max(1, sum(layers.values()))


def _of_amaxes(plan: Plan, one: PlannedCollective, *, of_weights_only: bool) -> float:
    """Of a row of amaxes, which those of inputs, weights and output gradients share."""
    quantized = {each.name: each for each in plan.quantized}
    single, every = 0.0, 0
    for each in amax_reductions(plan.request, plan.mesh, plan.quantized):
        found = each.component, each.phase, each.axes, each.values * AMAX_BYTES
        if found != (one.component, one.phase, one.axes, one.bytes_per_device):
            continue
        every += each.times
        if each.operand == "weight" or not of_weights_only:
            single += each.times * _share_of_one(plan, quantized[each.weights[0]])
    return single / every if every else 0.0


def _share_of_one(plan: Plan, weight: QuantizedWeight) -> float:
    """The share of a weight's quantized layers that are in loops over one layer; 1 outside the stacks."""
    row = plan.by_name[weight.name]
    runs = _runs(plan, row.stack, row.num)
    return sum(len(run) == 1 and run.start < weight.num for run in runs) / weight.num


def _loops_of_one(plan: Plan, stack: str | None, num: int) -> int:
    """The loops over one layer of a stack, of which the last layers may stay in high precision; 1 outside the stacks."""
    return sum(len(run) == 1 for run in _runs(plan, stack, num))


def _runs(plan: Plan, stack: str | None, num: int) -> tuple[range, ...]:
    return layer_runs(num, [one.num for one in plan.quantized if one.stack == stack])
