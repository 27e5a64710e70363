"""Modules whose weights rest as codes with sizes that nothing divides, on ``meta`` and on a CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    TransformerLayer,
)
from shardwright.engine_torch.modules.parallel import ParallelModule
from tests.engine_torch.compiled_ranks import differing
from tests.engine_torch.own_modules import WITH_OPTIONS
from tests.engine_torch.resting_cases import RECIPES
from tests.matrix import rest

ATTENTION: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODULES: Mapping[str, Callable[..., nn.Module]] = {
    "linear": partial(Linear, 48, 257),
    "norm and linear": partial(LayerNormLinear, 48, 81),
    "gated": partial(LayerNormMLP, 48, 70, activation="swiglu"),
    "grouped": partial(GroupedLinear, 3, 48, 50),
    "layer": partial(TransformerLayer, 52, 70, 13, **ATTENTION),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_on_meta_and_on_a_cpu_the_codes_are_the_same(module: str, recipe: str) -> None:
    """Of sizes that no block divides."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(7)
        ours = MODULES[module](recipe=WITH_OPTIONS.get(recipe, recipe), primary_weights="codes", device=device)
        for part in ours.modules():
            if isinstance(part, ParallelModule):
                part.reset_parameters(defer_init=False)
        state = ours.state_dict()
        assert any(name.endswith("_codes") for name in state)
        found.append([*state.values(), *ours.parameters()])
    assert not differing(*([tensor for tensor in tensors if not hasattr(tensor, "held")] for tensors in found))


def head(vocab: int, recipe: str, tp: int) -> nn.Module:
    return Linear(64, vocab, bias=False, parallel_mode="column", tp_size=tp, recipe=recipe, primary_weights="codes")


def attention(heads: int, recipe: str, tp: int) -> nn.Module:
    return MultiheadAttention(
        1536, heads, 64, 0.0, tp_size=tp, set_parallel_mode=True, recipe=recipe, primary_weights="codes", device="meta"
    )


def test_a_vocabulary_that_nothing_divides_is_refused_with_the_sizes_that_would_do() -> None:
    with pytest.raises(InputError, match=r"does not divide 50257\. Take 50240 or 50304, or other tp ranks"):
        head(50257, "mxfp8", 2)
    with pytest.raises(InputError, match=r"heads=13, and tp 2 does not divide it\. Take 12 or 14, or"):
        attention(13, "mxfp8", 2)
    layer = Linear(64, 50257, bias=False, recipe="mxfp8", primary_weights="codes", device="meta")
    layer.reset_parameters()
    assert layer(torch.ones(1, 64)).shape == (1, 50257)


def advised(message: str) -> list[int]:
    """The sizes that a message names: heads of 64 channels, where it names features."""
    advice = re.search(r"Take (\d+)(?: or (\d+))?", message)
    assert advice is not None, message
    return [int(number) // (64 if " features=" in message else 1) for number in advice.groups() if number is not None]


@pytest.mark.parametrize("seed", [*range(20), *(rest(number) for number in range(20, 400))])
def test_sizes_that_are_advised_are_accepted(seed: int) -> None:
    """At once; of heads, whose features also have blocks, the second time."""
    draw = random.Random(seed)
    make, size, most = draw.choice([(head, draw.randint(200, 2000), 1), (attention, draw.randint(3, 40), 2)])
    recipe, tp = draw.choice(RECIPES[:4]), draw.choice([2, 3, 4, 6, 8])
    sizes = [size]
    for _ in range(most + 1):
        refused = []
        for number in sizes:
            try:
                make(number, recipe, tp)
            except InputError as error:
                refused.append(str(error))
        sizes = [number for message in refused for number in advised(message)]
    assert not sizes
