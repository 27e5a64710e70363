"""Modules whose weights rest as codes in a user's own ``torch.compile``: traced whole, with the bits of the module as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.engine_torch.io.private import COMPILES_WHOLE
from shardwright.engine_torch.modules import (
    Embedding,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    keep_main_weights,
    update_scales,
)
from tests.engine_torch.compiled_ranks import compiled, differing, on_fsdp, resting_steps, tokens_of
from tests.engine_torch.own_modules import WITH_OPTIONS
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.resting_cases import RECIPES as RESTING
from tests.matrix import rest

# PyTorch's own, of what it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* was up to .* times what its factor holds"),
    pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.skipif(
        not COMPILES_WHOLE, reason="modules with a recipe are traced from PyTorch 2.13 on, and refuse fullgraph before"
    ),
]

IN, OUT = 64, 96


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """A compiler makes at most 8 programs of a function in a process, whose modules have one recipe."""
    torch.compiler.reset()


MODULES: Mapping[str, tuple[Callable[..., nn.Module], Mapping[str, Any]]] = {
    "linear": (partial(Linear, IN, OUT), {}),
    "norm and linear": (partial(LayerNormLinear, IN, OUT), {}),
    "gated": (partial(LayerNormMLP, IN, OUT, activation="swiglu"), {}),
    "grouped": (partial(GroupedLinear, 2, IN, OUT), {"m_splits": [20, 12]}),
    "layer": (partial(TransformerLayer, IN, OUT, 4, 2, hidden_dropout=0.0, attention_dropout=0.0), {}),
}
KEPT = {
    ("linear", "fp8-delayed"),
    ("norm and linear", "fp8-block"),
    ("gated", "fp8-row"),
    ("grouped", "mxfp8"),
}
"""A recipe for each module, but for whole layers, which take the longest."""
CASES = [
    pair if pair in KEPT else rest(*pair) for pair in ((module, recipe) for module in MODULES for recipe in RESTING)
]


@pytest.mark.parametrize(("module", "recipe"), CASES)
def test_steps_have_the_bits_of_the_module_as_it_is(module: str, recipe: str) -> None:
    make, arguments = MODULES[module]
    tokens = [tokens_of(32, IN).roll(step).view((32, IN) if module != "layer" else (8, 4, IN)) for step in range(2)]
    found = []
    for way in (compiled, lambda module: module):
        torch.manual_seed(5)
        ours = make(recipe=WITH_OPTIONS.get(recipe, recipe), primary_weights="codes")
        found.append(resting_steps(ours, way(ours), tokens, arguments))
    assert not differing(*found)


@pytest.mark.parametrize("recipe", [name if name == "mxfp8" else rest(name) for name in RESTING])
def test_pytorchs_compiler_for_cpus_takes_codes_and_scales(recipe: str) -> None:
    """Its default, which makes programs of what the other tests only trace; scales of E8M0 are no numbers to it."""
    x, found = tokens_of(32, IN), []
    for way in (partial(torch.compile, fullgraph=True), lambda module: module):
        torch.manual_seed(5)
        module = linear(WITH_OPTIONS.get(recipe, recipe), bias=False)  # The compiler sums a bias in another order.
        run = way(module)
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        found.append([y.detach(), *(tensor.grad for tensor in (leaf, *module.parameters()) if tensor.grad is not None)])
    assert len(found[0]) == 3
    assert not differing(*found)


def linear(recipe: object = "mxfp8", **options: Any) -> Linear:
    module = Linear(IN, IN, recipe=recipe, primary_weights="codes", **options)
    module.reset_parameters()
    return module


class Surrounded(nn.Module):
    """A layer that is computed again, two that share codes, a head that quantizes the weight of an embedding, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(IN, IN)
        self.recomputed = linear("nvfp4")
        self.first, self.second, self.head, self.frozen = (
            Linear(IN, IN, bias=False, recipe="mxfp8", primary_weights="codes") for _ in range(4)
        )
        self.second.weight, self.head.weight = self.first.weight, self.embedding.weight
        for module in (self.embedding, self.first, self.second, self.head, self.frozen):
            module.reset_parameters()
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.recomputed, x + self.embedding(torch.arange(len(x))), use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return self.head(self.frozen(self.second(self.first(x))))


@pytest.mark.matrix
def test_what_is_computed_again_tied_or_frozen_has_the_same_bits_too() -> None:
    found = []
    for way in (compiled, lambda module: module):
        torch.manual_seed(5)
        module = Surrounded()
        keep_main_weights(module)
        x = tokens_of(32, IN).requires_grad_()
        y = way(module)(x)
        y.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        assert [name for name, gradient in gradients.items() if gradient is None] == ["frozen.weight"]
        found.append([y.detach(), x.grad, *(gradient for gradient in gradients.values() if gradient is not None)])
    assert not differing(*found)


@pytest.mark.parametrize("recipe", ["fp8-delayed", rest("mxfp8")])
def test_what_has_changed_since_its_codes_is_quantized_in_the_program(recipe: str) -> None:
    """Whoever has written to a weight, and without a word to the module that is compiled."""
    module = linear(recipe)
    keep_main_weights(module)
    run, x = compiled(module), tokens_of(32, IN)
    for step in range(3):
        with torch.no_grad():
            module.weight.mul_(3.0)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            ours = run(x)
        assert module.resting.state_dict()  # Codes are made of what has changed.
        assert torch.equal(ours, module(x))
        with torch.no_grad():
            module.weight.add_(0.5)
    update_scales(module)


def test_an_optimizers_step_stays_untraced_and_changes_codes() -> None:
    module, other = linear(), linear()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    keep_main_weights(module, optimizer)
    keep_main_weights(other)
    module(tokens_of(32, IN)).square().sum().backward()
    torch.compile(optimizer.step, backend="aot_eager")()
    state = module.state_dict()
    assert not torch.equal(state["weight"], other.state_dict()["weight"])
    other.load_state_dict({name: state[name] for name in ("weight", "bias")}, strict=False)
    assert not differing(list(state.values()), list(other.state_dict().values()))


@pytest.mark.parametrize(
    ("recipe", "mesh"), [rest("mxfp8", "fsdp"), rest("fp8-delayed", "fsdp"), rest("fp8-current", "tp")]
)
def test_ranks_have_the_bits_too(four: Ranks, recipe: str, mesh: str) -> None:
    assert four.first(2).run(on_fsdp, recipe, mesh) == [[]] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_fsdp_and_tensor_parallelism_have_the_bits_too(four: Ranks, recipe: str) -> None:
    assert four.run(on_fsdp, recipe, "both") == [[]] * 4
