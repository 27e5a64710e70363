"""Modules in a user's own ``torch.compile``: traced whole from PyTorch 2.13 on, with the bits of the module as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.engine_torch.modules import (
    Embedding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    update_scales,
)
from shardwright.engine_torch.precision.operands import values
from tests.engine_torch.compiled_ranks import compiled, on_ranks, states, tokens_of, two_passes
from tests.engine_torch.ranks import Ranks
from tests.matrix import rest

# PyTorch's own, of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.> should not be instantiated")

IN, OUT = 64, 96
PACKED: Mapping[str, Any] = {
    "attn_input_format": "thd",
    "self_attn_mask_type": "padding_causal",
    "window_size": (5, 0),
    "qk_norm_type": "RMSNorm",
}
MODULES: Mapping[str, tuple[Callable[..., nn.Module], torch.dtype, Mapping[str, Any]]] = {
    "norm and linear, bfloat16": (
        partial(LayerNormLinear, IN, OUT, params_dtype=torch.bfloat16),
        torch.bfloat16,
        {},
    ),
    "gated": (partial(LayerNormMLP, IN, OUT, activation="swiglu", normalization="RMSNorm"), torch.float32, {}),
    "packed layer": (
        partial(TransformerLayer, IN, OUT, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, **PACKED),
        torch.float32,
        {
            "cu_seqlens_q": torch.tensor([0, 12, 32], dtype=torch.int32),
            "rotary_pos_emb": RotaryPositionEmbedding(16)(20),
        },
    ),
    "grouped": (partial(GroupedLinear, 2, IN, OUT), torch.float32, {"m_splits": [32, 0]}),
}
KEPT = {("norm and linear, bfloat16", "fp8-row"), ("gated", None), ("packed layer", None), ("grouped", "fp8-delayed")}
CASES = [
    (module, recipe) if (module, recipe) in KEPT else rest(module, recipe)
    for module in MODULES
    for recipe in (None, *PRESETS)
]


@pytest.mark.parametrize(("module", "recipe"), CASES)
def test_a_module_is_traced_whole_and_changes_no_bit(module: str, recipe: str | None) -> None:
    make, dtype, arguments = MODULES[module]
    found = []
    for way in (compiled, lambda one: one):
        torch.manual_seed(5)
        one = make(recipe=recipe)
        run = way(one)
        found.append([*two_passes(one, run, tokens_of(32, IN, dtype), arguments, update_scales), *states(one)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_experts_may_have_other_tokens_in_each_call() -> None:
    one = GroupedLinear(3, IN, OUT)
    run = compiled(one)
    for splits in ([20, 0, 12], [5, 7, 1], [9, 3, 30]):
        x = tokens_of(sum(splits), IN)
        assert torch.equal(run(x, m_splits=splits), one(x, m_splits=splits))


@pytest.mark.parametrize("one", [RMSNorm(IN), LayerNorm(IN), Embedding(IN, OUT)], ids=lambda one: type(one).__name__)
def test_modules_without_products_are_too(one: nn.Module) -> None:
    x = torch.arange(IN) if isinstance(one, Embedding) else tokens_of(32, IN)
    assert torch.equal(compiled(one)(x), one(x))


@pytest.mark.parametrize("sequence_parallel", [rest(False), True])
@pytest.mark.parametrize("recipe", [None, rest("fp8-delayed"), rest("fp8-current")])
def test_ranks_of_tensor_parallelism_are_too(four: Ranks, recipe: str | None, *, sequence_parallel: bool) -> None:
    assert four.first(2).run(on_ranks, recipe, sequence_parallel) == [True] * 2


@pytest.mark.parametrize("name", ["fp8-block", rest("mxfp8"), rest("nvfp4")])
def test_a_last_block_that_is_not_full_has_all_its_elements(name: str) -> None:
    """With PyTorch's compiler for CPUs, not only traced."""
    quantizer = preset(name).quantizers["weight_gradient", "input"]
    x = tokens_of(156, 48).T
    assert torch.equal(torch.compile(partial(values, quantizer=quantizer), fullgraph=True)(x), values(x, quantizer))
