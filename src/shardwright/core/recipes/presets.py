"""The recipes by name. Options have the names of Transformer Engine's recipes (``transformer_engine.common.recipe``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0
from shardwright.core.recipes.recipe import PER_ROW, PER_TENSOR, Block, History, Operand, Product, Quantizer, Recipe, Scale

Quantizers = Mapping[tuple[Product, Operand], Quantizer]


def _delayed(*, margin: int = 0, amax_history_len: int = 1024, amax_compute_algo: str = "max", interval: int = 1) -> Recipe:
    history = History(
        amax_history_len=amax_history_len,
        amax_compute_algo="max" if amax_compute_algo == "max" else "most_recent",
        margin=margin,
        interval=interval,
    )
    scale = Scale(rule="exact")
    return Recipe(
        name="fp8-delayed",
        quantizers=_per_operand(
            forward=Quantizer(dtype=E4M3, block=PER_TENSOR, scale=scale, amax="delayed"),
            gradient=Quantizer(dtype=E5M2, block=PER_TENSOR, scale=scale, amax="delayed"),
        ),
        history=history,
        source="arXiv:2209.05433; DelayedScaling",
    )


def _current(*, use_power_2_scales: bool = False) -> Recipe:
    scale = Scale(rule="power of two up" if use_power_2_scales else "exact")
    return Recipe(
        name="fp8-current",
        quantizers=_per_operand(
            forward=Quantizer(dtype=E4M3, block=PER_TENSOR, scale=scale),
            gradient=Quantizer(dtype=E5M2, block=PER_TENSOR, scale=scale),
        ),
        source="Float8CurrentScaling",
    )


def _row(*, use_power_2_scales: bool = True) -> Recipe:
    """The weight gradient stays high: its scales would be of a column of all tokens."""
    row = Quantizer(dtype=E4M3, block=PER_ROW, scale=Scale(rule="power of two up" if use_power_2_scales else "exact"))
    quantizers = _per_operand(forward=row, gradient=row)
    return Recipe(
        name="fp8-row",
        quantizers={place: each for place, each in quantizers.items() if place[0] != "weight_gradient"},
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


def _mxfp8(*, enable_2d_quantization: bool = False, rounding: str = "up") -> Recipe:
    scale = Scale(rule="power of two up" if rounding == "up" else "power of two down", dtype=E8M0)
    row = Quantizer(dtype=E4M3, block=Block(contracted=32, other=1), scale=scale)
    square = Quantizer(dtype=E4M3, block=Block(contracted=32, other=32), scale=scale)
    return Recipe(
        name="mxfp8",
        quantizers=_per_operand(forward=row, gradient=row, weight=square if enable_2d_quantization else row),
        source="OCP Microscaling Formats 1.0; MXFP8BlockScaling",
    )


def _nvfp4(
    *, disable_rht: bool = False, disable_stochastic_rounding: bool = False, disable_2d_quantization: bool = False
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
