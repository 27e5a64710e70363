"""Every constructor and call takes what Transformer Engine's does: in its order, at its defaults, and otherwise refuses by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch.modules import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    autocast,
    fp8_autocast,
    fp8_model_init,
)
from shardwright.engine_torch.modules.parts.activations import ACTIVATIONS
from shardwright.engine_torch.modules.parts.arguments import UNUSED
from shardwright.engine_torch.modules.parts.recipe_objects import RECIPES
from shardwright.engine_torch.modules.parts.signatures import CALLS, CONSTRUCTORS, REQUIRED, arguments
from tests.engine_torch.refused_modules import refusal

SIZES = {"in_features": 8, "out_features": 4, "hidden_size": 8, "ffn_hidden_size": 4, "num_gemms": 2}
MODULES: dict[str, Callable[..., nn.Module]] = {
    module.__name__: module for module in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, LayerNorm, RMSNorm)
}


def required(name: str) -> dict[str, Any]:
    table = arguments(CONSTRUCTORS[name])
    sizes = {argument: SIZES[argument] for argument, default in table.items() if default is REQUIRED}
    return sizes or {"normalized_shape": 8}


def called(module: nn.Module, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    grouped = {"m_splits": [2, 1]} if isinstance(module, GroupedLinear) else {}
    return module(torch.randn(3, 8), **grouped, **options)


@pytest.mark.parametrize("name", MODULES)
def test_arguments_have_its_order_and_defaults(name: str) -> None:
    table = {**arguments(CONSTRUCTORS[name]), "device": None}
    ours = list(inspect.signature(MODULES[name]).parameters.values())
    known = {argument.name: argument.default for argument in ours}
    assert {argument: known[argument] for argument in arguments(CONSTRUCTORS[name])} == {
        argument: table[argument] for argument in arguments(CONSTRUCTORS[name])
    }
    in_order = [argument.name for argument in ours if argument.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert in_order == list(arguments(CONSTRUCTORS[name]))
    by_default = {**arguments(CONSTRUCTORS[name]), **required(name), "device": "cpu"}
    by_default = {
        argument: value for argument, value in by_default.items() if argument in table and argument in in_order
    }
    modules = []
    for values, options in (((), required(name)), ((), by_default), (tuple(by_default.values()), {})):
        torch.manual_seed(0)
        modules.append(called(MODULES[name](*values, **options)))
    assert torch.equal(modules[0], modules[1])
    assert torch.equal(modules[0], modules[2])


@pytest.mark.parametrize(("name", "call"), [(name, CALLS[name]) for name in MODULES if name in CALLS])
def test_calls_have_its_order_and_defaults(name: str, call: str) -> None:
    ours = inspect.signature(MODULES[name].forward).parameters  # pyright: ignore[reportFunctionMemberAccess]
    assert {argument: value.default for argument, value in list(ours.items())[1:]} == dict(arguments(call))
    module = MODULES[name](**required(name))
    for argument in arguments(call):
        if argument in UNUSED:
            text = refusal(lambda argument=argument: called(module, **{argument: "other"}))
            assert text.startswith(f"{name}: {argument}='other' is Transformer Engine's, and is not done here. ")


@pytest.mark.parametrize("name", MODULES)
def test_what_has_no_meaning_here_is_refused_with_what_to_do(name: str) -> None:
    table = arguments(CONSTRUCTORS[name])
    unused = [argument for argument in table if argument in UNUSED]
    for argument in unused:
        assert UNUSED[argument][0] == table[argument], argument
        text = refusal(lambda argument=argument: MODULES[name](**required(name), **{argument: "other"}))
        assert (
            text == f"{name}: {argument}='other' is Transformer Engine's, and is not done here. {UNUSED[argument][1]}."
        )


@pytest.mark.parametrize(
    ("construct", "text"),
    [
        (lambda: Linear(8), "Linear needs out_features."),
        (lambda: Linear(8, 8, in_features=8), "Linear: 'in_features' is given by position and by name. Give it once."),
        (lambda: RMSNorm(*range(7)), "RMSNorm takes 6 arguments by position, and was given 7."),
        (lambda: LayerNorm(), "LayerNorm needs normalized_shape, or its older name hidden_size, and not both."),
        (lambda: Linear(8, 8, biass=False), "Linear has no argument 'biass'. Did you mean 'bias'?"),
        (
            lambda: LayerNormMLP(8, 8, activation="gelu", activation_params={"limit": 1.0}),
            "activation_params has 'limit' for activation 'gelu'; only clamped_swiglu has parameters: limit, alpha, glu_linear_offset.",
        ),
    ],
)
def test_a_call_that_cannot_be_is_one_kind_of_error(construct: Callable[[], object], text: str) -> None:
    assert refusal(construct) == text


def test_the_older_name_of_a_norms_size() -> None:
    assert RMSNorm(hidden_size=8).specs == RMSNorm(8).specs


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "glu": lambda gate, up: functional.glu(torch.cat([up, gate], -1)),
    "geglu": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: gate.relu() * up,
    "sreglu": lambda gate, up: gate.relu() ** 2 * up,
    "qgeglu": lambda gate, up: gate / (1 + (-1.702 * gate).exp()) * up,
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "clamped_swiglu": lambda gate, up: (
        gate.clamp(max=7.0) / (1 + (-1.702 * gate.clamp(max=7.0)).exp()) * (up.clamp(-7.0, 7.0) + 1.0)
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gated_activations(name: str) -> None:
    gate, up = 10 * torch.randn(2, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](gate, up), GATES[name](gate, up))
    assert {argument for argument, each in ACTIVATIONS.items() if each.gated} == set(GATES)


class Format(Enum):
    E4M3, E5M2, HYBRID, E2M1 = range(4)


def recipe_object(name: str, **fields: object) -> object:
    return make_dataclass(name, [(argument, object, field(default=value)) for argument, value in fields.items()])()


PLAIN = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None, "_cached_repr": None}
OBJECTS = (
    (
        recipe_object(
            "DelayedScaling", margin=1, fp8_format=Format.HYBRID, amax_history_len=16, reduce_amax=True, **PLAIN
        ),
        preset("fp8-delayed", margin=1, amax_history_len=16),
    ),
    (
        recipe_object(
            "Float8CurrentScaling", use_power_2_scales=True, fp8_format=Format.E4M3, fp8_gemm_fprop=1, **PLAIN
        ),
        preset("fp8-current", use_power_2_scales=True, fp8_format="E4M3"),
    ),
    (
        recipe_object("MXFP8BlockScaling", margin=0, fp8_format=Format.E4M3, enable_2d_quantization=True, **PLAIN),
        preset("mxfp8", enable_2d_quantization=True),
    ),
    (
        recipe_object("Float8BlockScaling", use_f32_scales=True, w_block_scaling_dim=2),
        preset("fp8-block", use_f32_scales=True),
    ),
    (recipe_object("NVFP4BlockScaling", disable_rht=True, fp4_format=Format.E2M1), preset("nvfp4", disable_rht=True)),
)


@pytest.mark.parametrize(("recipe", "needed"), OBJECTS, ids=lambda argument: type(argument).__name__)
def test_recipe_objects_are_known_by_their_class(recipe: object, needed: object) -> None:
    assert Linear(128, 128, recipe=recipe).recipe == needed


def test_recipes_by_the_names_of_their_classes() -> None:
    for name, fields in RECIPES.items():
        assert Linear(128, 128, recipe=name).recipe == preset(fields.preset)


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (
            recipe_object("MXFP8BlockScaling", margin=2),
            "MXFP8BlockScaling: margin is 2; these modules compute 0. Leave it at its default.",
        ),
        (
            recipe_object("DelayedScaling", fp8_format=Format.E5M2),
            "DelayedScaling: fp8_format is 'E5M2'; these modules compute 'HYBRID' or 'E4M3'. Leave it at its default.",
        ),
        (
            recipe_object("DelayedScaling", amax_compute_algo=max),
            "DelayedScaling: amax_compute_algo is <built-in function max>; these modules compute 'max' or 'most_recent'. Leave it at its "
            "default.",
        ),
        (
            recipe_object("Float8BlockScaling", rows=3),
            "Float8BlockScaling: these modules do not know its field 'rows', which is 3.",
        ),
    ],
)
def test_fields_of_recipes_that_are_not_computed(recipe: object, text: str) -> None:
    assert refusal(lambda: Linear(128, 128, recipe=recipe)) == text


def test_autocast_gives_modules_their_recipe_and_holds_them_to_it() -> None:
    high = Linear(32, 32)
    with autocast(recipe="mxfp8"):
        layer, norm = Linear(32, 32), RMSNorm(32)
        layer(norm(torch.ones(2, 32)))
        advice = "A module has the recipe of its constructor: give it recipe=, or construct it inside of autocast."
        assert refusal(lambda: high(torch.ones(2, 32))) == (
            f"Linear: autocast has the recipe 'mxfp8', and it was constructed with 'none'. {advice}"
        )
        with autocast(enabled=False):
            high(torch.ones(2, 32))
            assert "autocast has the recipe 'none'" in refusal(lambda: layer(torch.ones(2, 32)))
        layer(torch.ones(2, 32))
    assert (layer.recipe, norm.recipe) == (preset("mxfp8"), None)
    layer(torch.ones(2, 32))
    high(torch.ones(2, 32))
    with pytest.raises(InputError, match="calibrating=True is Transformer Engine's"), autocast(calibrating=True):
        pass


def test_the_earlier_names_of_contexts_mean_the_same() -> None:
    with fp8_autocast(True, False, "mxfp8"), fp8_model_init():
        layer = Linear(32, 32)
    assert (layer.recipe, layer.primary_weights) == (preset("mxfp8"), "codes")
    with pytest.raises(InputError, match="fp8_autocast: calibrating=True is"), fp8_autocast(calibrating=True):
        pass
    with autocast():
        assert Linear(8, 8).recipe == preset("fp8-delayed")
