"""Seconds of products under a recipe: counted by hand from the sizes of Llama 3.1 8B on one node of H100 or B200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.steps.elementwise import elementwise_bytes
from shardwright.cost.steps.precision import computing_seconds, kernels_of, quantization_bytes
from shardwright.cost.steps.products import RATES, Shape, share_of_highest
from shardwright.layouts import load_layout
from shardwright.models import build

TOKENS, EMBED, HIDDEN, LAYERS = 4096, 4096, 14336, 32
MLP_FLOPS = 2 * TOKENS * EMBED * HIDDEN * LAYERS
"""Of one of the three weights of the feed-forward layers, on each of 8 devices with a row of 4,096 tokens."""


def planned(recipe: str, kind: str, **options) -> Plan:
    request = Request(
        layout=load_layout("fsdp"),
        table=build("llama3-8b", {}),
        batch=8,
        length=TOKENS,
        devices=8,
        dtype="bfloat16",
        precision=preset(recipe, **options),
        chip=chip_of(kind).chip,
    )
    return make_plan(request)


@pytest.mark.parametrize(
    ("recipe", "kind", "rate"),
    [
        ("fp8-current", "h100", 1402.6e12),
        ("mxfp8", "h100", 794.5e12),
        ("mxfp8", "b200", 0.9 * 3432.5e12),
        ("fp8-block", "b200", 0.9 * 3432.5e12),
        ("fp8-current", "v6e", 827.5e12),
    ],
)
def test_products_take_the_rate_of_their_kernel(recipe: str, kind: str, rate: float) -> None:
    chip, plan = chip_of(kind), planned(recipe, kind)
    seconds = products_alone(plan, kind)
    # Gate and up have one shape; down is not recomputed. Their tiles fill the chip's waves differently.
    gate, down = Shape(TOKENS, EMBED, HIDDEN), Shape(TOKENS, HIDDEN, EMBED)
    wide, narrow = (MLP_FLOPS / rate / share_of_highest(chip, shape) for shape in (gate, down))
    assert seconds["mlp", "forward"] == pytest.approx(2 * wide + narrow)
    assert seconds["mlp", "recompute"] == pytest.approx(2 * wide)
    logits = Shape(TOKENS, EMBED, 128256)
    assert seconds["logits", "forward"] == pytest.approx(
        2 * TOKENS * EMBED * 128256 / chip.read("product_bf16_flops_per_s") / share_of_highest(chip, logits)
    )


def products_alone(plan: Plan, kind: str):
    """Seconds of the products of a step, without what lies between them, at what kernels reach."""
    chip = chip_of(kind)
    seconds = computing_seconds(plan, chip, "used")
    assert seconds is not None
    between = {where: moved / chip.read("copy_bytes_per_s") for where, moved in elementwise_bytes(plan).items()}
    return {where: total * chip.kernels_share() - between.get(where, 0.0) for where, total in seconds.items()}


@pytest.mark.parametrize(
    ("recipe", "program", "rate"),
    [
        ("fp8-block", "compiled", "product_bf16_flops_per_s"),
        ("fp8-block", "fused", "product_fp8_flops_per_s"),
        ("mxfp8", "fused", "product_bf16_flops_per_s"),
    ],
)
def test_on_hopper_a_fused_program_multiplies_codes_where_cublas_does(recipe: str, program: str, rate: str) -> None:
    chip, plan = replace(chip_of("h100"), program=program), planned(recipe, "h100")
    kernels = {RATES[one.kernel.rate] for weight in plan.quantized for one in kernels_of(plan, weight, chip).values()}
    assert kernels == {rate.removeprefix("product_")}


def test_a_product_with_an_operand_in_high_precision_has_the_rate_of_the_computation() -> None:
    """Of fp8-row the gradient of a weight has bfloat16's rate; on chips without tiles, whose products all have the highest."""
    chip = chip_of("h100")
    whole = replace(chip, numbers={name: one for name, one in chip.numbers.items() if name != "multiprocessors"})
    plan = planned("fp8-row", "h100")
    seconds = computing_seconds(plan, whole, "used")
    assert seconds is not None
    between = elementwise_bytes(plan)["mlp", "backward"] / 2.85e12
    alone = seconds["mlp", "backward"] * chip.kernels_share() - between
    assert alone == pytest.approx(3 * MLP_FLOPS / 1402.6e12 + 3 * MLP_FLOPS / 794.5e12)


def test_operands_are_read_and_written_to_be_quantized() -> None:
    """Of three weights, eleven products each with two operands: both scales are of tensors. Eager PyTorch reads each twice, a compiled program
    each tensor once in a pass, and a fused one once in a step."""
    plan = planned("fp8-current", "h100")
    mlp = _with(plan, [weight for weight in plan.quantized if weight.component == "mlp"])
    compiled, eager, fused = (
        quantization_bytes(mlp, replace(chip_of("h100"), program=program)) for program in ("compiled", "eager", "fused")
    )
    weight, narrow, wide = EMBED * HIDDEN, TOKENS * EMBED, TOKENS * HIDDEN
    # Gate and up: output twice, then both gradients. Down: output once.
    gate_or_up = 2 * (narrow + weight) + (wide + weight) + (narrow + wide)
    down = (wide + weight) + (narrow + weight) + (wide + narrow)
    assert eager == (2 * 2 + 1) * LAYERS * (2 * gate_or_up + down)
    # Gate and up multiply one tensor. It is made again, and once more read for their gradients, of which each cotangent is read once.
    forward = 2 * narrow + wide + 2 * 2 * weight + weight
    backward = narrow + wide + (2 * wide + narrow) + 3 * weight
    made = 2 * narrow + wide + 5 * weight + narrow + wide + 2 * (2 * wide + narrow) + 3 * weight
    assert compiled == LAYERS * (2 * (forward + backward) + made)
    # Weights are quantized once a step, and inputs are read once for both passes.
    read = 2 * narrow + wide + (2 * wide + narrow) + 3 * weight
    made = 2 * narrow + wide + narrow + wide + 2 * (2 * wide + narrow) + 2 * 3 * weight
    assert fused == LAYERS * (2 * read + made)


@pytest.mark.parametrize(("recipe", "kind"), [("fp8-delayed", "h100"), ("mxfp8", "b200")])
def test_a_fused_program_reads_nothing_where_a_scale_is_known_when_an_operand_is_made(recipe: str, kind: str) -> None:
    plan, chip = planned(recipe, kind), chip_of(kind)
    codes = quantization_bytes(plan, replace(chip, program="fused"))
    twice = replace(plan, request=replace(plan.request, microbatches=2))
    weights = sum(weight.num * 2 * EMBED * HIDDEN for weight in plan.quantized if weight.component == "mlp")
    assert codes < quantization_bytes(plan, replace(chip, program="compiled")) / 2
    # Codes of weights are of a step, all else is of a microbatch.
    assert weights < 2 * codes - quantization_bytes(twice, replace(chip, program="fused"))


def test_a_rate_without_a_source_gives_no_step() -> None:
    """A chip multiplies all bits of float32 where the scales of blocks are no powers of two."""
    machine = read_machine("v6e:2x4")
    assert price(planned("fp8-block", "v6e", use_f32_scales=True), machine).step is None
    assert price(planned("fp8-block", "v6e"), machine).step is not None


def _with(plan: Plan, quantized) -> Plan:
    return replace(plan, quantized=tuple(quantized))
