"""Recipes of low precision as data: formats against those of ml_dtypes, presets against the tables of their sources."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import pytest

from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0, FORMATS
from shardwright.core.recipes.presets import PRESETS, options_of, preset
from shardwright.core.recipes.recipe import OPERANDS, PER_TENSOR, Block, Recipe


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_that_of_ml_dtypes(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert (ours.bits, ours.mantissa, ours.least_exponent) == (theirs.bits, theirs.nmant, theirs.minexp)
    assert (ours.largest, ours.smallest) == (float(theirs.max), float(theirs.smallest_subnormal))


def of_operand(recipe: Recipe, attribute: str) -> dict[str, set[str]]:
    """The texts of one attribute of each operand's quantizers, of all products."""
    found: dict[str, set[str]] = {}
    for (_, operand), quantizer in recipe.quantizers.items():
        value = getattr(quantizer, attribute)
        found.setdefault(operand, set()).add(value.text if isinstance(value, Block) else value)
    return found


# arXiv:2209.05433 (delayed, current), arXiv:2412.19437 section 3.3.2 (block), OCP MX 1.0, arXiv:2509.25149 section 4.
BLOCKS = {
    "fp8-delayed": ("per tensor", "per tensor", "per tensor"),
    "fp8-current": ("per tensor", "per tensor", "per tensor"),
    "fp8-row": ("per row", "per row", "per row"),
    "fp8-block": ("1 x 128", "128 x 128", "1 x 128"),
    "mxfp8": ("1 x 32", "1 x 32", "1 x 32"),
    "nvfp4": ("1 x 16", "16 x 16", "1 x 16"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_blocks_of_its_source(name):
    recipe = preset(name)
    assert recipe.name == name
    assert recipe.source
    found = of_operand(recipe, "block")
    assert tuple(found[operand] for operand in ("input", "weight", "output_gradient")) == tuple(
        {text} for text in BLOCKS[name]
    )


def test_gradients_have_their_own_format_in_the_hybrid_recipes_only():
    by_recipe = {name: of_operand(preset(name), "dtype")["output_gradient"] for name in PRESETS}
    hybrid = {"fp8-delayed": {E5M2}, "fp8-current": {E5M2}}
    assert by_recipe == {**{key: {E4M3} for key in PRESETS}, **hybrid, "nvfp4": {E2M1}}
    assert of_operand(preset("fp8-delayed", fp8_format="E4M3"), "dtype")["output_gradient"] == {E4M3}


def test_all_products_are_quantized_but_the_weight_gradient_of_rows():
    products = {name: {product for product, _ in preset(name).quantizers} for name in PRESETS}
    assert products.pop("fp8-row") == {"output", "input_gradient"}
    assert set(map(frozenset, products.values())) == {frozenset(OPERANDS)}


def test_only_delayed_scaling_has_a_history():
    assert [name for name in PRESETS if preset(name).history is not None] == ["fp8-delayed"]
    history = preset("fp8-delayed", amax_history_len=16, amax_compute_algo="most_recent", margin=1).history
    assert history is not None
    assert (history.amax_history_len, history.amax_compute_algo, history.margin) == (16, "most_recent", 1)


def test_scales_of_tensors_and_of_blocks():
    assert {name for name in PRESETS for q in preset(name).quantizers.values() if q.of_tensor} == {
        "fp8-delayed",
        "fp8-current",
        "nvfp4",
    }
    scales = {name: {q.scale.dtype for q in preset(name).quantizers.values()} for name in PRESETS}
    assert scales == {**{key: {"float32"} for key in PRESETS}, "mxfp8": {E8M0}, "nvfp4": {E4M3}}
    rules = {
        (True, "fp8-row"): {"power of two up"},
        (True, "fp8-block"): {"power of two up"},
        (False, "fp8-row"): {"exact"},
        (False, "fp8-block"): {"exact"},
    }
    option = {"fp8-row": "round_scales_to_power_of_2", "fp8-block": "use_f32_scales"}
    for (power, name), expected in rules.items():
        recipe = preset(name, **{option[name]: power == (name == "fp8-row")})
        assert {q.scale.rule for q in recipe.quantizers.values()} == expected


def test_nvfp4_rounds_gradients_stochastically_and_transforms_the_operands_of_weight_gradients():
    quantizers = preset("nvfp4").quantizers
    assert {place for place, q in quantizers.items() if q.rounding == "stochastic"} == {
        ("input_gradient", "output_gradient"),
        ("weight_gradient", "output_gradient"),
    }
    assert {product for (product, _), q in quantizers.items() if q.hadamard == 16} == {"weight_gradient"}
    plain = preset("nvfp4", disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert {(q.block.text, q.rounding, q.hadamard) for q in plain.quantizers.values()} == {("1 x 16", "nearest", None)}


def test_a_block_of_a_product_is_along_its_contracted_dim():
    quantizers = preset("fp8-block").quantizers
    shown = {place: q.block.extents(*place) for place, q in quantizers.items()}
    assert shown == {
        ("output", "input"): {"tokens": 1, "inputs": 128},
        ("output", "weight"): {"inputs": 128, "outputs": 128},
        ("input_gradient", "output_gradient"): {"tokens": 1, "outputs": 128},
        ("input_gradient", "weight"): {"inputs": 128, "outputs": 128},
        ("weight_gradient", "input"): {"tokens": 128, "inputs": 1},
        ("weight_gradient", "output_gradient"): {"tokens": 128, "outputs": 1},
    }


def test_options_that_are_the_default_are_left_out_of_a_recipe():
    assert preset("mxfp8", scale_calculation_mode="rceil") == preset("mxfp8")
    assert preset("mxfp8", scale_calculation_mode="floor").options == {"scale_calculation_mode": "floor"}
    assert options_of("fp8-delayed")["amax_compute_algo"] == ("max", ("max", "most_recent"))
    assert options_of("fp8-delayed")["margin"] == (0, ())
    assert PER_TENSOR in {q.block for q in preset("fp8-delayed", margin=2).quantizers.values()}
    assert E8M0 in FORMATS


def test_how_weights_are_gathered_and_rest_is_no_number_and_how_tokens_are_sent_is() -> None:
    plain, sent = preset("mxfp8"), replace(preset("mxfp8"), dispatch_quantized=True)
    assert replace(plain, gather_quantized=True, rest_quantized=True).numbers == plain
    assert sent.numbers == sent
