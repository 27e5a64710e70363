"""The bytes by which `move: {moe: auto}` chooses: by hand, and as the plans of the three options send them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Recipe
from tests.core.test_collectives import plan_of

LAYOUT = """
name: mine
mesh: {{fsdp: {fsdp}, tensor: {tensor}, expert: {expert}}}
move: {{moe: {move}}}
roles: {{fsdp: fsdp, tensor: tensor, expert: {{elsewhere: fsdp, moe: expert}}}}
"""
LAYERS = 4
# A token of 128 float32; gate, up and down of 8 experts, 128 x 256 each.
TOKEN, EXPERTS = 128 * 4, 3 * 8 * 128 * 256 * 4
NOT_COUNTED = {"router.grouped_experts", "router.weights"}
"""Indices and routing weights of a token's experts: a few bytes a token."""


@pytest.mark.parametrize(
    ("sizes", "microbatches", "wire"),
    [
        # 8 rows of 64 tokens on 4 devices, 2 assignments each, half of which stay on their device.
        ((2, 1, 2), 1, (128 * TOKEN * 2 // 2 * 6, 128 * TOKEN * 5, EXPERTS // 2 * 3)),
        # In each of two microbatches half the tokens use the same weights.
        ((2, 1, 2), 2, (64 * TOKEN * 2 // 2 * 6, 64 * TOKEN * 5, EXPERTS // 2 * 3)),
        # An expert's hidden units stay sharded over tensor; tokens are replicated over it.
        ((2, 2, 2), 1, (128 * TOKEN * 2 // 2 * 6, 128 * TOKEN * 5, EXPERTS // 4 * 3)),
        ((1, 2, 4), 4, (32 * TOKEN * 2 * 3 // 4 * 6, 32 * TOKEN * 3 * 5, EXPERTS // 8 * 3 * 3)),
    ],
)
def test_wire_bytes_by_hand(sizes, microbatches, wire) -> None:
    text = LAYOUT.format(**dict(zip(("fsdp", "tensor", "expert"), sizes, strict=True)), move="auto")
    (choice,) = plan_of("mixtral-test", text, {}, microbatches=microbatches).choices
    assert choice.wire_bytes == dict(zip(("all-to-all", "ring", "weights"), wire, strict=True))
    assert choice.chosen == min(choice.wire_bytes, key=lambda option: choice.wire_bytes[option])


@pytest.mark.parametrize(("tensor", "expert", "microbatches"), list(product((1, 2), (2, 4), (1, 2))))
def test_wire_bytes_are_those_of_the_plans_collectives(tensor: int, expert: int, microbatches: int) -> None:
    codes = replace(preset("fp8-block"), dispatch_quantized=True)

    def plan(move: str, remat: str, recipe: Recipe | None):
        text = LAYOUT.format(fsdp=1, tensor=tensor, expert=expert, move=move)
        return plan_of("mixtral-test", text, {}, microbatches=microbatches, remat=remat, precision=recipe)

    for remat, recipe in (("full", None), ("none", None), ("full", codes), ("none", codes)):
        (choice,) = plan("auto", remat, recipe).choices
        for move, sent in choice.wire_bytes.items():
            rows = [
                c
                for c in plan(move, remat, recipe).collectives
                if c.component == "moe" and c.axes == ("expert",) and not NOT_COUNTED & set(c.tensors)
            ]
            in_a_step = sum(c.bytes_per_device * (expert - 1) // expert * c.count_per_step for c in rows)
            assert in_a_step == sent * LAYERS * microbatches, (move, remat)
