"""Recipes by Transformer Engine's names, and its recipe objects, which are known by the names of their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.presets import options_of, preset
from shardwright.core.recipes.recipe import Recipe

_ANYWHERE: Mapping[str, Sequence[Any]] = {"fp8_dpa": (False,), "fp8_mha": (False,), "backward_override": (None,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """``options``: of the preset, by the same names. ``only``: fields with the values that are computed; ``any``: fields of kernels, which
    change no codes."""

    preset: str
    options: Sequence[str] = ()
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    any: Sequence[str] = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")


RECIPES: Mapping[str, Fields] = {
    "DelayedScaling": Fields(
        preset="fp8-delayed",
        options=("margin", "amax_history_len", "amax_compute_algo", "interval", "fp8_format", "reduce_amax"),
        only={"scaling_factor_compute_algo": (None,), "override_linear_precision": ((False, False, False),)},
    ),
    "Float8CurrentScaling": Fields(preset="fp8-current", options=("use_power_2_scales", "fp8_format")),
    "MXFP8BlockScaling": Fields(
        preset="mxfp8", options=("fp8_format", "enable_2d_quantization"), only={"margin": (0,)}
    ),
    "Float8BlockScaling": Fields(
        preset="fp8-block",
        options=("use_f32_scales",),
        only={
            "fp8_format": ("E4M3",),
            "x_block_scaling_dim": (1,),
            "w_block_scaling_dim": (2,),
            "grad_block_scaling_dim": (1,),
        },
    ),
    "NVFP4BlockScaling": Fields(
        preset="nvfp4",
        options=("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
        only={
            "row_scaled_activation": (False,),
            "nvfp4_4over6": ("none",),
            "fp4_format": ("E2M1",),
            "fp8_format": ("E4M3",),
        },
        any=("nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"),
    ),
}
"""By the names of Transformer Engine's classes."""


def recipe_named(recipe: object) -> Recipe | None:
    """A recipe by the name of one of Transformer Engine's classes, or of an object of it; None for another value. Raises InputError for a field
    with a value that is not computed here."""
    if isinstance(recipe, str):
        return preset(RECIPES[recipe].preset) if recipe in RECIPES else None
    kind = next((base.__name__ for base in type(recipe).__mro__ if base.__name__ in RECIPES), None)
    if kind is None:
        return None
    fields = RECIPES[kind]
    options: dict[str, Any] = {}
    only = {**_ANYWHERE, **fields.only}
    for name in getattr(recipe, "__dataclass_fields__", None) or vars(recipe):
        value = getattr(recipe, name)
        value = getattr(value, "name", value) if name.endswith("_format") else value
        words = options_of(fields.preset)[name][1] if name in fields.options else ()
        if name in fields.options and (not words or value in words):
            options[name] = value
        elif words or name in only:
            if value not in (words or only[name]):
                needed = " or ".join(map(repr, words or only[name]))
                raise InputError(
                    f"{kind}: {name} is {value!r}; these modules compute {needed}. Leave it at its default."
                )
        elif name not in fields.any and not name.startswith("_"):
            raise InputError(f"{kind}: these modules do not know its field '{name}', which is {value!r}.")
    return preset(fields.preset, **options)
