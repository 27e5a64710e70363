"""Seconds of a step's products under a recipe of low precision, and of quantizing their operands.

A product of quantized operands takes the rate of its kernel (``core/recipes/kernels.py``), every other one that of the dtype of the
computation. To quantize an operand a device reads it, twice where the scale is of a tensor or a row, since its amax is needed
first, and writes what the kernel multiplies: codes, or values in the dtype of the kernel. Scales are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Phase, Plan
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.quantization.reductions import layers_on_device
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.kernels import ChosenKernel
from shardwright.core.recipes.recipe import ENTIRE, Product
from shardwright.core.resolution.resolve import traffic_of
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.steps.flops import step_products

RATES: Mapping[str, str] = {
    "float4": "fp4_flops_per_s",
    "float8": "fp8_flops_per_s",
    "bfloat16": "bf16_flops_per_s",
    "float32": "fp32_flops_per_s",
}
"""The number of a chip that is the rate of a kernel. ``float32`` multiplies all bits, unlike products in float32 by default."""


def flops_per_s(chip: ChipNumbers, dtype: str, reading: Reading) -> float:
    """The rate of matrix products in the dtype of the computation."""
    share = chip.read("float32_share_of_bf16", reading) if dtype == "float32" else 1.0
    return chip.read("bf16_flops_per_s", reading) * share


def computing_seconds(plan: Plan, chip: ChipNumbers, reading: Reading) -> Mapping[tuple[str, Phase], float] | None:
    """Seconds of the products by component and phase; None if no source was checked for the rate of one."""
    rate = flops_per_s(chip, plan.request.dtype, reading)
    quantized = {weight.name: weight for weight in plan.quantized}
    kernels = {
        name: weight.kernels_on(chip.chip.device, plan.request.engine, plan.request.dtype)
        for name, weight in quantized.items()
    }
    found: dict[tuple[str, Phase], float] = {}
    for one in step_products(plan):
        seconds = one.flops / rate
        kernel = kernels.get(one.weight or "", {}).get(one.product)
        if kernel is not None and one.weight is not None:
            if RATES[kernel.kernel.rate] not in chip.numbers:
                return None
            share = quantized[one.weight].num / plan.by_name[one.weight].num
            narrow = one.flops / chip.read(RATES[kernel.kernel.rate], reading)
            seconds = share * narrow + (1 - share) * seconds
        found[one.component, one.phase] = found.get((one.component, one.phase), 0.0) + seconds
    return found


def quantization_bytes(plan: Plan, chip: ChipNumbers) -> int:
    """Bytes that a device reads and writes in a step to quantize the operands of its products."""
    total = 0.0
    for weight in plan.quantized:
        kernels = weight.kernels_on(chip.chip.device, plan.request.engine, plan.request.dtype)
        times = layers_on_device(plan.request, plan.mesh, weight) * plan.request.microbatches
        for operand in weight.operands:
            passes = times * _passes(plan, weight, operand.product)
            total += passes * _elements(plan, operand) * _bytes(plan, operand, kernels.get(operand.product))
    return int(total)


def _passes(plan: Plan, weight: QuantizedWeight, product: Product) -> int:
    """How often a microbatch computes a product."""
    request = plan.request
    if product != "output" or weight.stack is None:
        return 1
    again = not request.table.weight(weight.name).ends_layer
    batched = weight.experts is not None
    return 1 + (again and (request.remat == "full" or (request.remat == "dots" and batched)))


def _elements(plan: Plan, operand: QuantizedOperand) -> float:
    """Of one layer and microbatch on a device; of experts' rows those of an even routing."""
    on_device = {dim: sharded.on_device(plan.mesh) for dim, sharded in operand.dims.items()}
    if operand.experts > 1 and "tokens" in on_device:
        rows = traffic_of(plan.request, plan.mesh).assignments
        return rows * next(size for dim, size in on_device.items() if dim != "tokens")
    elements = operand.experts
    for size in on_device.values():
        elements *= size
    return elements


def _bytes(plan: Plan, operand: QuantizedOperand, kernel: ChosenKernel | None) -> float:
    """Read and written for each element."""
    quantizer = operand.quantizer
    reads = 2 if quantizer.of_tensor or quantizer.block.contracted is ENTIRE else 1
    reads = 1 if quantizer.amax == "delayed" else reads
    width = DTYPE_BYTES[plan.request.dtype]
    if kernel is None:
        return reads * width + width
    written = bits_of(quantizer.dtype) / 8 if kernel.kernel.of_codes else DTYPE_BYTES[kernel.kernel.rate]
    return reads * width + written
