"""Seconds of what a device computes in a step, and bytes that it moves to quantize operands.

A product of quantized operands takes the rate of its kernel (``core/recipes/kernels.py``), every other one that of the dtype of the
computation, as far as its shape reaches it (``products.py``). Of attention half of the scores are computed, those of keys that a query
may see; backward takes five products, not four, since scores are not kept. Buffers of experts with a capacity are multiplied whole.
To quantize an operand a device reads it and writes what the kernel multiplies: codes, or values in the dtype of the kernel. Where the
scale is of a tensor or a row its amax is needed first: eager PyTorch reads the operand twice, a compiler finds the amax where the
operand is made. Scales are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Phase, Plan, layers_on_device
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.quantization.reductions import layers_on_device as quantized_layers
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.kernels import ChosenKernel
from shardwright.core.recipes.recipe import ENTIRE, Product
from shardwright.core.resolution.resolve import traffic_of
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.steps.elementwise import EAGER_PASSES, elementwise_bytes
from shardwright.cost.steps.flops import CountedProduct, step_products
from shardwright.cost.steps.products import RATES, Shape, attention_flops_per_s, copy_bytes_per_s, product_seconds

BACKWARD_SCORES = 5 / 4
"""Products of attention's backward pass, in multiples of those that are counted as twice forward: it computes the scores again."""


def computing_seconds(plan: Plan, chip: ChipNumbers, reading: Reading) -> Mapping[tuple[str, Phase], float] | None:
    """Seconds of products and of what lies between them, by component and phase; None if no source was checked for a rate."""
    quantized = {weight.name: weight for weight in plan.quantized}
    kernels = {
        name: weight.kernels_on(chip.chip.device, plan.request.engine, plan.request.dtype)
        for name, weight in quantized.items()
    }
    wide = "bfloat16" if plan.request.dtype == "bfloat16" else "default float32"
    found: dict[tuple[str, Phase], float] = {}
    shapes: dict[str, Shape] = {}
    for one in step_products(plan):
        if one.weight is None:
            seconds = _attention(plan, one, chip, reading)
        else:
            if one.phase == "forward":
                shapes[one.weight] = forward_shape(plan, one.weight, one.flops)
            flops, shape = one.flops * _slots(plan, one.weight), shapes[one.weight].of(one.product)
            kernel = kernels.get(one.weight, {}).get(one.product)
            share = 0.0 if kernel is None else quantized[one.weight].num / plan.by_name[one.weight].num
            seconds = (1 - share) * _wide(chip, flops, shape, wide, reading)
            if kernel is not None:
                if RATES[kernel.kernel.rate] not in chip.numbers:
                    return None
                seconds += share * product_seconds(chip, flops, shape, kernel.kernel.rate, reading)
        where = one.component, one.phase
        found[where] = found.get(where, 0.0) + seconds
    rate = copy_bytes_per_s(chip, reading) / (EAGER_PASSES if program_of(plan, chip) == "eager" else 1.0)
    for where, moved in elementwise_bytes(plan).items():
        found[where] = found.get(where, 0.0) + moved / rate
    return {where: seconds / chip.kernels_share(reading) for where, seconds in found.items()}


def moving_seconds(chip: ChipNumbers, moved: float, reading: Reading) -> float:
    """Seconds of passes over memory in a step."""
    return moved / copy_bytes_per_s(chip, reading) / chip.kernels_share(reading)


def program_of(plan: Plan, chip: ChipNumbers) -> str:
    """``eager`` or ``compiled``: the engine's own, unless a file of the user's says which."""
    return chip.program or ("eager" if plan.request.engine == "torch" else "compiled")


def _wide(chip: ChipNumbers, flops: float, shape: Shape, dtype: str, reading: Reading) -> float:
    seconds = product_seconds(chip, flops, shape, "bfloat16", reading)
    return seconds if dtype == "bfloat16" else seconds / chip.read("float32_share_of_bf16", reading)


def _attention(plan: Plan, one: CountedProduct, chip: ChipNumbers, reading: Reading) -> float:
    backward = one.phase == "backward"
    rate = attention_flops_per_s(
        chip, plan.request.engine, "backward" if backward else "forward", plan.request.dtype, reading
    )
    return one.flops * visible_share(plan) * (BACKWARD_SCORES if backward else 1.0) / rate


def visible_share(plan: Plan) -> float:
    """Of the scores of a device's queries, those that it computes: of the device whose queries see the most keys, if they differ."""
    shards = plan.mesh.size(plan.request.layout.axes_with("context", "attention"))
    exchanged = plan.request.layout.move_attention == "ulysses"
    return 0.5 if exchanged or not plan.rows_in_order else 1 - 1 / (2 * shards)


def _slots(plan: Plan, weight: str) -> float:
    """How many slots of a buffer are multiplied, for each assignment that is counted."""
    table = plan.request.table
    return max(1.0, table.capacity_factor or 1.0) if "experts" in table.weight(weight).logical_axes else 1.0


def forward_shape(plan: Plan, weight: str, flops: float) -> Shape:
    """The forward product of one layer and one microbatch, of one expert for experts. ``flops``: of all of them in a step."""
    tensor, table = plan.by_name[weight], plan.request.table
    dims = tensor.in_use.dims[len(tensor.in_use.dims) - len(tensor.shape) :]
    local = {
        dim.logical_axis: ceil(size / plan.mesh.size(dim.axes)) for dim, size in zip(dims, tensor.shape, strict=True)
    }
    # A table lists what is contracted first, and PyTorch may have merged some of the dims.
    axes = [axis for axis in table.weight(weight).logical_axes if axis in local and axis != "experts"]
    if axes[-1] == "embed" and axes[0] != "vocab":
        k, n = prod(local[axis] for axis in axes[:-1]), local["embed"]
    else:
        inner = "embed" if axes[0] == "vocab" else axes[0]
        k, n = local[inner], prod(local[axis] for axis in axes if axis != inner)
    layers = layers_on_device(plan.request, plan.mesh, tensor)
    rows = flops / (2 * prod(local.values()) * layers * plan.request.microbatches)
    return Shape(rows, k, n)


def quantization_bytes(plan: Plan, chip: ChipNumbers) -> int:
    """Bytes that a device reads and writes in a step to quantize the operands of its products."""
    total = 0.0
    for weight in plan.quantized:
        kernels = weight.kernels_on(chip.chip.device, plan.request.engine, plan.request.dtype)
        times = quantized_layers(plan.request, plan.mesh, weight) * plan.request.microbatches
        for operand in weight.operands:
            passes = times * _passes(plan, weight, operand.product)
            total += passes * _elements(plan, operand) * _bytes(plan, chip, operand, kernels.get(operand.product))
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


def _bytes(plan: Plan, chip: ChipNumbers, operand: QuantizedOperand, kernel: ChosenKernel | None) -> float:
    """Read and written for each element."""
    quantizer = operand.quantizer
    after_amax = quantizer.amax != "delayed" and (quantizer.of_tensor or quantizer.block.contracted is ENTIRE)
    reads = 2 if after_amax and program_of(plan, chip) == "eager" else 1
    width = DTYPE_BYTES[plan.request.dtype]
    if kernel is None:
        return reads * width + width
    written = bits_of(quantizer.dtype) / 8 if kernel.kernel.of_codes else DTYPE_BYTES[kernel.kernel.rate]
    return reads * width + written
