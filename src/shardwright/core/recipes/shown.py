"""A recipe as JSON values, and as a text."""

from __future__ import annotations

from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.recipe import Quantizer, Recipe


def recipe_json(recipe: Recipe) -> dict[str, object]:
    """Everything that a recipe says, as a plan and a lock have it."""
    history = recipe.history
    return {
        "recipe": recipe.name,
        "options": dict(recipe.options),
        "high": list(recipe.high),
        "high_layers": recipe.high_layers,
        "quantized": list(recipe.quantized),
        "reduce_amax": recipe.reduce_amax,
        "gather_quantized": recipe.gather_quantized,
        "rest_quantized": recipe.rest_quantized,
        "dispatch_quantized": recipe.dispatch_quantized,
        "counter_based": recipe.counter_based,
        "history": None
        if history is None
        else {
            "amax_history_len": history.amax_history_len,
            "amax_compute_algo": history.amax_compute_algo,
            "margin": history.margin,
            "interval": history.interval,
        },
        "operands": [
            {"product": product, "operand": operand, **_quantizer_json(quantizer)}
            for (product, operand), quantizer in recipe.quantizers.items()
        ],
    }


def _quantizer_json(quantizer: Quantizer) -> dict[str, object]:
    return {
        "dtype": quantizer.dtype,
        "block": quantizer.block.text,
        "scale": quantizer.scale.rule,
        "scale_dtype": quantizer.scale.dtype,
        "of_tensor": quantizer.scale.of_tensor,
        "amax": quantizer.amax,
        "rounding": quantizer.rounding,
        "hadamard": quantizer.hadamard,
    }


def recipe_text(recipe: Recipe) -> str:
    """The recipe in one line: its name, and what differs from the preset of that name. Equal recipes have equal texts.

    >>> recipe_text(preset("mxfp8")), recipe_text(preset("fp8-delayed", amax_history_len=16))
    ('mxfp8', 'fp8-delayed amax_history_len=16')
    """
    found = {**recipe_json(recipe), "recipe": None, "options": None}
    plain = recipe_json(preset(recipe.name, **recipe.options)) if recipe.name in PRESETS else {}
    differs = {key: value for key, value in found.items() if value is not None and value != plain.get(key)}
    return " ".join((recipe.name, *(f"{key}={value}" for key, value in {**recipe.options, **differs}.items())))
