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
from shardwright.cost.steps.precision import computing_seconds, quantization_bytes
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
        ("fp8-current", "h100", 1978.8e12),
        ("mxfp8", "h100", 989e12),
        ("mxfp8", "b200", 4450e12),
        ("fp8-block", "b200", 4450e12),
        ("fp8-current", "v6e", 918e12),
    ],
)
def test_products_take_the_rate_of_their_kernel(recipe: str, kind: str, rate: float) -> None:
    seconds = computing_seconds(planned(recipe, kind), chip_of(kind), "used")
    assert seconds is not None
    assert seconds["mlp", "forward"] == pytest.approx(3 * MLP_FLOPS / rate)
    # The last product of a layer is not recomputed.
    assert seconds["mlp", "recompute"] == pytest.approx(2 * MLP_FLOPS / rate)
    assert seconds["mlp", "backward"] == pytest.approx(6 * MLP_FLOPS / rate)
    assert seconds["logits", "forward"] == pytest.approx(
        2 * TOKENS * EMBED * 128256 / chip_of(kind).read("bf16_flops_per_s")
    )


def test_a_product_with_an_operand_in_high_precision_has_the_rate_of_the_computation() -> None:
    seconds = computing_seconds(planned("fp8-row", "h100"), chip_of("h100"), "used")
    assert seconds is not None
    assert seconds["mlp", "backward"] == pytest.approx(3 * MLP_FLOPS / 1978.8e12 + 3 * MLP_FLOPS / 989e12)


def test_operands_are_read_and_written_to_be_quantized() -> None:
    """Of three weights, eleven products each with two operands: both scales are of tensors, so that each is read twice."""
    plan = planned("fp8-current", "h100")
    mlp = [weight for weight in plan.quantized if weight.component == "mlp"]
    only_mlp = quantization_bytes(_with(plan, mlp), chip_of("h100"))
    read_twice_and_written = 2 * 2 + 1
    weight, narrow, wide = EMBED * HIDDEN, TOKENS * EMBED, TOKENS * HIDDEN
    # Gate and up: output twice, then both gradients. Down: output once.
    gate_or_up = 2 * (narrow + weight) + (wide + weight) + (narrow + wide)
    down = (wide + weight) + (narrow + weight) + (wide + narrow)
    assert only_mlp == read_twice_and_written * LAYERS * (2 * gate_or_up + down)


def test_a_rate_without_a_source_gives_no_step() -> None:
    """A chip multiplies all bits of float32 where the scales of blocks are no powers of two."""
    machine = read_machine("v6e:2x4")
    assert price(planned("fp8-block", "v6e", use_f32_scales=True), machine).step is None
    assert price(planned("fp8-block", "v6e"), machine).step is not None


def _with(plan: Plan, quantized) -> Plan:
    return replace(plan, quantized=tuple(quantized))
