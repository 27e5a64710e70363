"""The recipes by name. Options have the names of Transformer Engine's recipes (``transformer_engine.common.recipe``); where it
has none for one, torchao's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_type_hints

from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0
from shardwright.core.recipes.recipe import (
    PER_ROW,
    PER_TENSOR,
    Block,
    History,
    Operand,
    Product,
    Quantizer,
    Recipe,
    Scale,
)

Quantizers = Mapping[tuple[Product, Operand], Quantizer]
Format = Literal["HYBRID", "E4M3"]
"""``HYBRID``: E4M3 for inputs and weights, E5M2 for output gradients."""
Algorithm = Literal["max", "most_recent"]
ScaleMode = Literal["rceil", "floor"]


def _delayed(
    *,
    margin: int = 0,
    amax_history_len: int = 1024,
    amax_compute_algo: Algorithm = "max",
    interval: int = 1,
    fp8_format: Format = "HYBRID",
    reduce_amax: bool = True,
) -> Recipe:
    history = History(
        amax_history_len=amax_history_len, amax_compute_algo=amax_compute_algo, margin=margin, interval=interval
    )
    forward = Quantizer(dtype=E4M3, block=PER_TENSOR, scale=Scale(rule="exact"), amax="delayed")
    return Recipe(
        name="fp8-delayed",
        quantizers=_per_operand(forward=forward, gradient=replace(forward, dtype=_of_gradients(fp8_format))),
        history=history,
        reduce_amax=reduce_amax,
        source="arXiv:2209.05433; DelayedScaling",
    )


def _current(*, use_power_2_scales: bool = False, fp8_format: Format = "HYBRID", reduce_amax: bool = True) -> Recipe:
    scale = Scale(rule="power of two up" if use_power_2_scales else "exact")
    forward = Quantizer(dtype=E4M3, block=PER_TENSOR, scale=scale)
    return Recipe(
        name="fp8-current",
        quantizers=_per_operand(forward=forward, gradient=replace(forward, dtype=_of_gradients(fp8_format))),
        reduce_amax=reduce_amax,
        source="Float8CurrentScaling",
    )


def _row(*, round_scales_to_power_of_2: bool = True, reduce_amax: bool = True) -> Recipe:
    """The weight gradient stays high: its scales would be of a column of all tokens."""
    scale = Scale(rule="power of two up" if round_scales_to_power_of_2 else "exact")
    row = Quantizer(dtype=E4M3, block=PER_ROW, scale=scale)
    quantizers = _per_operand(forward=row, gradient=row)
    return Recipe(
        name="fp8-row",
        quantizers={place: each for place, each in quantizers.items() if place[0] != "weight_gradient"},
        reduce_amax=reduce_amax,
        source="torchao, rowwise_with_gw_hp",
    )


def _block(*, use_f32_scales: bool = False) -> Recipe:
    scale = Scale(rule="exact" if use_f32_scales else "power of two up")
    tokens = Quantizer(dtype=E4M3, block=Block(contracted=128, other=1), scale=scale)
    weight = Quantizer(dtype=E4M3, block=Block(contracted=128, other=128), scale=scale)
    return Recipe(
        name="fp8-block",
        quantizers=_per_operand(forward=tokens, gradient=tokens, weight=weight),
        source="arXiv:2412.19437, section 3.3; Float8BlockScaling",
    )


def _mxfp8(
    *, enable_2d_quantization: bool = False, scale_calculation_mode: ScaleMode = "rceil", fp8_format: Format = "E4M3"
) -> Recipe:
    scale = Scale(rule="power of two up" if scale_calculation_mode == "rceil" else "power of two down", dtype=E8M0)
    row = Quantizer(dtype=E4M3, block=Block(contracted=32, other=1), scale=scale)
    square = Quantizer(dtype=E4M3, block=Block(contracted=32, other=32), scale=scale)
    return Recipe(
        name="mxfp8",
        quantizers=_per_operand(
            forward=row,
            gradient=replace(row, dtype=_of_gradients(fp8_format)),
            weight=square if enable_2d_quantization else row,
        ),
        source="OCP Microscaling Formats 1.0; MXFP8BlockScaling",
    )


def _nvfp4(
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    reduce_amax: bool = True,
    counter_based: bool = True,
) -> Recipe:
    scale = Scale(rule="exact", dtype=E4M3, of_tensor=True)
    row, square = Block(contracted=16, other=1), Block(contracted=16, other=16)
    transform = None if disable_rht else 16

    def quantizer(block: Block, *, gradient: bool = False, of_weight_gradient: bool = False) -> Quantizer:
        return Quantizer(
            dtype=E2M1,
            block=block,
            scale=scale,
            rounding="stochastic" if gradient and not disable_stochastic_rounding else "nearest",
            hadamard=transform if of_weight_gradient else None,
        )

    weight = quantizer(row if disable_2d_quantization else square)
    return Recipe(
        name="nvfp4",
        quantizers={
            ("output", "input"): quantizer(row),
            ("output", "weight"): weight,
            ("input_gradient", "output_gradient"): quantizer(row, gradient=True),
            ("input_gradient", "weight"): weight,
            ("weight_gradient", "input"): quantizer(row, of_weight_gradient=True),
            ("weight_gradient", "output_gradient"): quantizer(row, gradient=True, of_weight_gradient=True),
        },
        reduce_amax=reduce_amax,
        counter_based=counter_based,
        source="arXiv:2509.25149; NVFP4BlockScaling",
    )


PRESETS: Mapping[str, Callable[..., Recipe]] = {
    "fp8-delayed": _delayed,
    "fp8-current": _current,
    "fp8-row": _row,
    "fp8-block": _block,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
"""Each makes its recipe from the options that its source has."""


def preset(name: str, **options: Any) -> Recipe:
    """The recipe of that name, which has the options that are not their default.

    >>> preset("fp8-delayed", amax_history_len=16, margin=0).options
    {'amax_history_len': 16}
    """
    defaults = {option: default for option, (default, _) in options_of(name).items()}
    given = {option: value for option, value in options.items() if value != defaults[option]}
    return replace(PRESETS[name](**options), options=given)


def options_of(name: str) -> Mapping[str, tuple[bool | int | str, tuple[str, ...]]]:
    """The default of each option of a preset, and the words that it may be; none where it is a number, or true or false.

    >>> options_of("mxfp8")["scale_calculation_mode"]
    ('rceil', ('rceil', 'floor'))
    """
    hints = get_type_hints(PRESETS[name])
    parameters = inspect.signature(PRESETS[name]).parameters
    return {option: (one.default, get_args(hints[option])) for option, one in parameters.items()}


def _of_gradients(fp8_format: Format) -> str:
    return E5M2 if fp8_format == "HYBRID" else E4M3


def _per_operand(*, forward: Quantizer, gradient: Quantizer, weight: Quantizer | None = None) -> Quantizers:
    """``forward`` for inputs, ``weight`` for weights (or as inputs), ``gradient`` for output gradients, in every product."""
    return {
        ("output", "input"): forward,
        ("output", "weight"): weight or forward,
        ("input_gradient", "output_gradient"): gradient,
        ("input_gradient", "weight"): weight or forward,
        ("weight_gradient", "input"): forward,
        ("weight_gradient", "output_gradient"): gradient,
    }
