"""Modules under delayed scaling: their state follows Transformer Engine's formula, ranks agree on it, and another recipe's is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.core.recipes.formats import E5M2
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Block, Recipe
from shardwright.engine_torch.modules import GroupedLinear, LayerNormMLP, Linear, update_scales
from tests.engine_torch.own_delayed import agreed, batches, layer, of_another_recipe, steps, unequal
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.refused_modules import refusal

LENGTH = 4
RECIPE = preset("fp8-delayed", amax_history_len=LENGTH)


def kept(module: Linear, operand: str) -> tuple[float, list[float]]:
    assert module.delayed is not None
    one = module.delayed.kept("weight", operand)  # pyright: ignore[reportArgumentType]
    return float(one.factor), one.history.tolist()


def test_the_state_is_that_of_the_amaxes_of_the_steps() -> None:
    """Of both microbatches the larger; the factor is 448 divided by the largest of the history."""
    module = layer()
    weights = []
    for number, x in enumerate(batches()):
        weights.append(float(module.weight.detach().abs().max()))
        steps(module, [x])
        inputs = [float(one.abs().max()) for one in batches()[: number + 1]]
        for operand, amaxes in (("input", inputs), ("weight", weights)):
            factor, history = kept(module, operand)
            assert history == [0.0] * (LENGTH - len(amaxes)) + amaxes
            assert factor == np.float32(448) / np.float32(max(amaxes))
    assert module.delayed is not None
    assert int(module.delayed.steps) == 3


def test_a_step_multiplies_by_the_factors_of_the_steps_before() -> None:
    module, x = layer(), batches()[0]
    steps(module, batches())
    factors = {operand: kept(module, operand)[0] for operand in ("input", "weight")}
    values = {
        operand: (one.detach() * factors[operand]).clamp(-448, 448).to(torch.float8_e4m3fn).double() / factors[operand]
        for operand, one in (("input", x), ("weight", module.weight))
    }
    assert module.bias is not None
    needed = functional.linear(values["input"], values["weight"], module.bias.double())
    np.testing.assert_allclose(module(x).detach().numpy(), needed.detach().numpy(), rtol=0, atol=1e-4)


def test_only_training_has_amaxes() -> None:
    module = layer()
    module.eval()(torch.ones(2, 16))
    with torch.no_grad():
        module.train()(torch.ones(2, 16))
    update_scales(module)
    assert kept(module, "input") == (1.0, [0.0] * LENGTH)


def forgetful(module: nn.Module, xs: list[torch.Tensor], rate: float = 1e-3) -> None:
    """Steps whose end is forgotten."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for x in xs:
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["linear", "one of several"])
def test_a_step_without_an_end_is_warned_of(kind: str) -> None:
    module = layer()
    if kind == "one of several":
        # The other one ends its steps.
        other = Linear(16, 16, recipe=RECIPE)
        other(batches()[0]).sum().backward()
        update_scales(other)
    with pytest.warns(UserWarning, match="update_scales") as found:
        forgetful(module if kind == "linear" else nn.Sequential(other, module), batches()[:2])
    assert [str(one.message) for one in found] == [
        "Linear 'up': 'weight' has changed, and no update_scales has ended the step before: with 'fp8-delayed amax_history_len=4' all is "
        "multiplied by factors of 1. Call update_scales(model) in every step, on every rank, after the last backward pass."
    ]


def test_several_passes_of_a_step_need_no_end() -> None:
    """Microbatches, recomputation, a module that is called twice, evaluation, a load, a cast; warnings are errors here."""
    module, x = layer(), batches()[0]
    for _ in range(3):
        checkpoint(module, x, use_reentrant=False).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    module.load_state_dict({name: 2 * one if name == "weight" else one for name, one in module.state_dict().items()})
    module(x).sum().backward()
    module.reset_parameters()
    module(x).sum().backward()
    module.eval()(x)
    # A rate of 0 changes nothing; after the first end it is no longer looked at.
    forgetful(module.train(), batches(), rate=0.0)
    update_scales(module)
    forgetful(module, batches())


def test_a_cast_leaves_factors_and_histories() -> None:
    module = layer()
    steps(module, batches())
    before = [kept(module, operand) for operand in ("input", "weight", "output_gradient")]
    module.to(torch.bfloat16)
    assert [kept(module, operand) for operand in ("input", "weight", "output_gradient")] == before


def test_every_weight_has_a_state_of_its_own() -> None:
    module = nn.ModuleList(
        [LayerNormMLP(8, 16, activation="swiglu", recipe=RECIPE), GroupedLinear(2, 8, 4, recipe=RECIPE)]
    )
    module[0](torch.randn(3, 8)).sum().backward()
    module[1](torch.randn(3, 8), [3, 0]).sum().backward()
    update_scales(module)
    factors = {name: float(one) for name, one in module.state_dict().items() if name.endswith("_factor")}
    weights = {"0.delayed.fc1_weight", "0.delayed.fc1_gate_weight", "0.delayed.fc2_weight", "1.delayed.weight0"}
    assert {name.rpartition("_input_")[0] for name in factors if "_input_" in name} == {*weights, "1.delayed.weight1"}
    # A layer without tokens keeps its factor, but for the weight's.
    assert [factors[f"1.delayed.weight1_{of}_factor"] for of in ("input", "output_gradient")] == [1.0, 1.0]
    assert factors["1.delayed.weight1_weight_factor"] > 1


def test_a_resumed_interval_goes_on() -> None:
    recipe = preset("fp8-delayed", amax_history_len=LENGTH, interval=2)
    torch.manual_seed(1)
    module, other = Linear(16, 8, recipe=recipe), Linear(16, 8, recipe=recipe)
    steps(module, batches()[:1])
    other.load_state_dict(module.state_dict())
    for one in (module, other):
        steps(one, batches()[1:2])
        assert kept(one, "input")[0] == np.float32(448) / np.float32(batches()[1].abs().max())


def test_ranks_agree_on_the_amaxes_of_their_tokens(four: Ranks) -> None:
    ranks = four.run(agreed)
    entire = [0.0, *(float(x.abs().max()) for x in batches())]
    of_pairs = [[0.0, *(float(x.chunk(2)[pair].abs().max()) for x in batches())] for pair in (0, 1)]
    assert [of_all for of_all, _ in ranks] == [entire] * 4
    assert [of_pair for _, of_pair in ranks] == [of_pairs[0], of_pairs[0], of_pairs[1], of_pairs[1]]


def test_unequal_histories_are_refused_on_every_rank_with_both_values(four: Ranks) -> None:
    advice = (
        "Load one checkpoint on all ranks, and call update_scales on all of them in every step; ranks that share no tokens need an "
        "amax_group of their own."
    )
    assert (
        four.run(unequal)
        == [
            (
                f"Linear 'up': weight of 'weight': the ranks differ in its factor: 1.0 on rank 0, 2.0 on rank 2. {advice}",
                f"Linear 'up': weight of 'weight': the ranks differ in its history (place 3): 0.0 on rank 0, 0.5 on rank 1. {advice}",
            )
        ]
        * 4
    )


def test_the_state_of_another_recipe_is_refused_by_name(one: Ranks, tmp_path: Path) -> None:
    reason = (
        "the checkpoint is of a module with the recipe 'fp8-delayed amax_history_len=4', and this one has 'fp8-delayed "
        "amax_history_len=4 margin=2'. Its factors and histories would mean something else. Construct the module with the recipe of the "
        "checkpoint, or load its weights only."
    )
    ours, in_place, *plain = one.run(of_another_recipe, tmp_path)[0]
    assert ours == (
        f"{tmp_path}/ours/checkpoints/step-00000001: the checkpoint does not fit, and nothing of it was loaded:\n"
        f"  'delayed.recipe': {reason}"
    )
    assert in_place == f"Linear 'up': 'delayed.recipe': {reason}"
    assert plain == [f"Error(s) in loading state_dict for Linear:\n\t'delayed.recipe': {reason}"] * 2


def changed(of: str, **change: object) -> Recipe:
    quantizers = dict(RECIPE.quantizers)
    place = ("output", of)
    quantizers[place] = replace(quantizers[place], **change)  # pyright: ignore[reportArgumentType]
    return replace(RECIPE, quantizers=quantizers)


REFUSED = (
    (
        lambda: Linear(8, 8, recipe=replace(RECIPE, reduce_amax=False)),
        "recipe 'fp8-delayed': with reduce_amax=False each rank would keep other histories, of which a checkpoint would hold one. Leave "
        "it out, and give an amax_group if ranks have tensors of their own.",
    ),
    (
        lambda: Linear(8, 8, recipe=changed("input", dtype=E5M2)),
        "recipe 'fp8-delayed': input has delayed amaxes and the formats float8_e4m3fn and float8_e5m2; it has one factor. Give it one "
        "format in all products.",
    ),
    (
        lambda: Linear(8, 8, recipe=changed("weight", block=Block(contracted=4, other=4))),
        "recipe 'fp8-delayed': it takes amaxes of earlier steps for blocks, or for scales in powers of two (of weight in output), which "
        "these modules do not compute. Use one of fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, or change that.",
    ),
)


@pytest.mark.parametrize(("do", "text"), REFUSED)
def test_what_has_no_single_factor_is_refused(do: Callable[[], object], text: str) -> None:
    assert refusal(do) == text


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("gather_quantized", True, "these modules gather codes only of weights that rest as codes. Leave it out, or"),
        ("dispatch_quantized", True, "dispatch_quantized is true, and these modules send no tokens."),
        ("high", ("*.attention.*",), "which chooses among the weights of a model, and a module has no model."),
        ("high_layers", 1, "and give recipe=None to the modules that are to stay in high precision."),
    ],
)
def test_what_a_module_would_ignore_is_refused(option: str, value: object, text: str) -> None:
    recipe = replace(preset("mxfp8"), **{option: value})  # pyright: ignore[reportArgumentType]
    assert text in refusal(lambda: Linear(8, 8, recipe=recipe))
