"""Seconds of what a device computes in a step, and bytes that it moves to quantize operands.

A product of quantized operands takes the rate of its kernel (``core/recipes/kernels.py``), every other one that of the dtype of the
computation, as far as its shape reaches it (``products.py``). Of attention half of the scores are computed, those of keys that a query
may see; backward takes five products, not four, since scores are not kept. Buffers of experts with a capacity are multiplied whole.

To quantize an operand a device reads it and writes what the kernel multiplies: codes, or values in the dtype of the kernel. Scales are left
out: they are small.

| program | reads an operand | writes |
|---|---|---|
| eager | for each product; twice, where the scale is of a tensor or a row, whose amax is needed first | for each product |
| compiled | once in a forward and once in a backward pass, for all products of it: the amax is found where it is made | once for products alike: of queries, keys and values |
| fused | once, for both passes; not at all where its scale is known when it is made: delayed scales, and those of blocks | the same; weights once a step, and not in each microbatch |

Fused by hand are Megatron-Core's programs: Transformer Engine casts and transposes in one kernel, quantizes inside of norms and activations,
and keeps the codes of weights while ``is_first_microbatch`` is false (docs.nvidia.com, Transformer Engine, ``te.Linear``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import ceil, prod

from shardwright.core.engines.engines import ENGINES
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Phase, Plan, layers_on_device
from shardwright.core.policies.repeated import share_again, share_made_again
from shardwright.core.policies.runs import runs_of
from shardwright.core.quantization.dispatch import (
    arrays_of_rows,
    coded_layers,
    sent_rows,
)
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.quantization.reductions import layers_on_device as quantized_layers
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.kernels import ChosenKernel, KernelName
from shardwright.core.recipes.recipe import ENTIRE, Product
from shardwright.core.resolution.resolve import traffic_of
from shardwright.core.resolution.token_hops import token_hops
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.steps.elementwise import EAGER_PASSES, elementwise_bytes
from shardwright.cost.steps.flops import CountedProduct, step_products
from shardwright.cost.steps.launches import launch_seconds
from shardwright.cost.steps.products import RATES, Shape, attention_flops_per_s, copy_bytes_per_s, product_seconds
from shardwright.cost.steps.routing import EVEN, is_of_experts

BACKWARD_SCORES = 5 / 4
"""Products of attention's backward pass, in multiples of those that are counted as twice forward: it computes the scores again."""

SCALED_BY_BLOCKS: Mapping[KernelName, float] = {"mx": 0.9, "mx of experts": 0.9, "nvfp4": 0.8}
"""What products whose scales are of blocks reach of the rate that was measured with one scale for a tensor, with the order that their scales are brought into.
Fitted to published steps that differ in nothing else (docs/cost.md): with MXFP8 they take 1.02 to 1.12 times as long as with current scaling, where the
rate alone had 0.96 to 0.97. For FP4 no rate was measured: 0.8 of twice FP8's."""


def computing_seconds(
    plan: Plan, chip: ChipNumbers, reading: Reading, shares: float = EVEN
) -> Mapping[tuple[str, Phase], float] | None:
    """Seconds of products and of what lies between them, by component and phase; None if no source was checked for a rate. ``shares``: of
    experts' rows (``routing.py``)."""
    quantized = {weight.name: weight for weight in plan.quantized}
    kernels = {name: kernels_of(plan, weight, chip) for name, weight in quantized.items()}
    wide = "bfloat16" if plan.request.dtype == "bfloat16" else "default float32"
    found: dict[tuple[str, Phase], float] = {}
    shapes: dict[str, Shape] = {}
    for one in step_products(plan):
        if one.weight is None:
            seconds = _attention(plan, one, chip, reading)
        else:
            received = shares if is_of_experts(plan, one.weight) else EVEN
            if one.phase == "forward":
                shapes[one.weight] = forward_shape(plan, one.weight, received * one.flops)
            flops = received * one.flops * _slots(plan, one.weight)
            shape = shapes[one.weight].of(one.product)
            kernel = kernels.get(one.weight, {}).get(one.product)
            share = 0.0 if kernel is None else quantized[one.weight].num / plan.by_name[one.weight].num
            seconds = (1 - share) * _wide(chip, flops, shape, wide, reading)
            if kernel is not None:
                if RATES[kernel.kernel.rate] not in chip.numbers:
                    return None
                narrow = product_seconds(chip, flops, shape, kernel.kernel.rate, reading)
                seconds += share * narrow / SCALED_BY_BLOCKS.get(kernel.kernel.name, 1.0)
        where = one.component, one.phase
        found[where] = found.get(where, 0.0) + seconds
    rate = copy_bytes_per_s(chip, reading) / (EAGER_PASSES if program_of(plan, chip) == "eager" else 1.0)
    static_on = chip.network if plan.request.properties.static_rows and program_of(plan, chip) == "compiled" else None
    for where, moved in elementwise_bytes(plan, shares, static_on).items():
        found[where] = found.get(where, 0.0) + moved / rate
    busy = {where: seconds / chip.kernels_share(reading) for where, seconds in found.items()}
    if program_of(plan, chip) == "fused":
        for where, started in launch_seconds(plan, chip):
            busy[where] = max(busy.get(where, 0.0), started)
    return busy


def kernels_of(plan: Plan, weight: QuantizedWeight, chip: ChipNumbers) -> Mapping[Product, ChosenKernel]:
    """The kernel of each product of a weight. Where any engine's library multiplies codes, a fused program does: on Hopper Transformer Engine multiplies
    FP8 with scales of blocks by cuBLAS, as PyTorch does (``Float8BlockScaling``), and XLA has no kernel for it."""
    device, dtype = chip.chip.device, plan.request.dtype
    kernels = weight.kernels_on(device, plan.request.engine, dtype)
    if program_of(plan, chip) != "fused" or _of_codes(kernels):
        return kernels
    of_libraries = (weight.kernels_on(device, engine, dtype) for engine in ENGINES)
    return next(filter(_of_codes, of_libraries), kernels)


def _of_codes(kernels: Mapping[Product, ChosenKernel]) -> bool:
    return any(chosen.kernel.of_codes for chosen in kernels.values())


def moving_seconds(chip: ChipNumbers, moved: float, reading: Reading) -> float:
    """Seconds of passes over memory in a step."""
    return moved / copy_bytes_per_s(chip, reading) / chip.kernels_share(reading)


def program_of(plan: Plan, chip: ChipNumbers) -> str:
    """``eager``, ``compiled`` or ``fused``: the engine's own, which is never fused, unless a file of the user's says which."""
    return chip.program or ("compiled" if plan.request.properties.compiled else "eager")


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
    return max(1.0, plan.request.table.capacity_factor or 1.0) if is_of_experts(plan, weight) else 1.0


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


def quantization_bytes(plan: Plan, chip: ChipNumbers, shares: float = EVEN) -> int:
    """Bytes that a device reads and writes in a step to quantize the operands of its products. ``shares``: of experts' rows."""
    program = program_of(plan, chip)
    moved: dict[Hashable, float] = {}
    for weight in plan.quantized:
        kernels = kernels_of(plan, weight, chip)
        layers = quantized_layers(plan.request, plan.mesh, weight)
        for operand in weight.operands:
            once = program == "fused" and operand.operand == "weight"
            times = layers * (1 if once else plan.request.microbatches * _passes(plan, weight, operand.product))
            elements = times * _elements(plan, operand, shares)
            read, written = _bytes(plan, program, operand, kernels.get(operand.product))
            # Weights that multiply one tensor may be made again in unequal parts: the most counts.
            for what, size in zip(_made(weight, operand, program), (read, written), strict=True):
                moved[what] = max(moved.get(what, 0.0), elements * size)
    return int(sum(moved.values()) + _dispatch_bytes(plan))


def _made(weight: QuantizedWeight, operand: QuantizedOperand, program: str) -> tuple[Hashable, Hashable]:
    """What is read, and what is written, to quantize an operand: what is equal is so once. A kernel of eager PyTorch knows only its own
    product; a compiled program reads a tensor once in each pass; a fused one makes the codes of both passes in the first."""
    if program == "eager":
        return ("read", weight.name, operand.product, operand.operand), (weight.name, operand.product, operand.operand)
    tensor = operand.same_amax[: operand.same_amax.index(operand.operand) + 1]
    forward = program == "fused" or operand.product == "output"
    return ("read", tensor, forward), (tensor, operand.product, operand.quantizer)


def _dispatch_bytes(plan: Plan) -> float:
    """Bytes that a device reads and writes to quantize the rows that it sends to experts, and to make values of those that it receives."""
    request, sent = plan.request, sent_rows(plan.request.precision, plan.request.table.names)
    names, runs = request.table.names, runs_of(request.table, request.remat)
    total = 0
    # Of cotangents only those that are sent inside of a node are codes.
    for quantizer, weights, passes, first_hop in (
        (sent.tokens, names.reading_weights, 1 + share_made_again(runs, names.received), 0),
        (sent.cotangents, names.output_weights, 1, -1),
    ):
        layers = coded_layers(request, plan.mesh, plan.quantized, weights)
        if quantizer is not None and layers:
            width = plan.by_name[names.dispatched].shape[-1]
            row_bytes = width * DTYPE_BYTES[request.dtype] + sum(
                one.row_bytes for one in arrays_of_rows(quantizer, width)
            )
            rows = sum(hop.even_rows for hop in token_hops(request, plan.mesh)[first_hop:])
            total += 2 * rows * row_bytes * layers * passes * request.microbatches
    return total


def _passes(plan: Plan, weight: QuantizedWeight, product: Product) -> float:
    """How often a microbatch computes a product, in the mean over layers."""
    request = plan.request
    if product != "output":
        return 1
    return 1 + share_again(request.table, runs_of(request.table, request.remat), request.table.weight(weight.name))


def _elements(plan: Plan, operand: QuantizedOperand, shares: float) -> float:
    """Of one layer and microbatch on a device; of experts' rows those that it receives."""
    on_device = {dim: sharded.on_device(plan.mesh) for dim, sharded in operand.dims.items()}
    if operand.experts > 1 and "tokens" in on_device:
        rows = shares * traffic_of(plan.request, plan.mesh).assignments
        return rows * next(size for dim, size in on_device.items() if dim != "tokens")
    elements = operand.experts
    for size in on_device.values():
        elements *= size
    return elements


def _bytes(plan: Plan, program: str, operand: QuantizedOperand, kernel: ChosenKernel | None) -> tuple[float, float]:
    """Read and written for each element. Scales of a row or a tensor are known once all of it is."""
    quantizer = operand.quantizer
    after_amax = quantizer.amax != "delayed" and (quantizer.of_tensor or quantizer.block.contracted is ENTIRE)
    reads = {"eager": 2 if after_amax else 1, "compiled": 1, "fused": 1 if after_amax else 0}[program]
    width = DTYPE_BYTES[plan.request.dtype]
    if kernel is None:
        return reads * width, width
    return reads * width, bits_of(quantizer.dtype) / 8 if kernel.kernel.of_codes else DTYPE_BYTES[kernel.kernel.rate]
