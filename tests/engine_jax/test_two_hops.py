"""Tokens that go to their experts by way of nodes: the layer by its definition, what overflows, and what the program sends over each axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.resolution.token_hops import token_hops
from tests.engine_jax.program import Program, assert_program_is_the_plan
from tests.engine_jax.steps import Case as Staged
from tests.engine_jax.steps import assert_trains_as, compiled_step
from tests.engine_jax.steps import plan_of as plan_of_step
from tests.engine_jax.test_moe import (
    DROPPING,
    EMBED,
    LENGTH,
    ROWS,
    TWO_AXES,
    Case,
    compiled_layer,
    dense_gradients,
    plan_of,
    result_of,
    token_by_token,
)
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, MIXTRAL
from tests.sameness.cases import case as of_sameness

NODES = (
    "name: nodes of {node}\nmesh: {{node: {node}, expert: {expert}}}\n"
    "roles: {{node: {{elsewhere: fsdp, moe: expert}}, expert: {{elsewhere: {inside}, moe: expert}}}}\n"
)


def nodes(node: int, expert: int, inside: str = "fsdp", **options: object) -> Case:
    layout = NODES.format(node=node, expert=expert, inside=inside)
    return Case(layout=layout, move="two-hops", **options)  # pyright: ignore[reportArgumentType]


CASES = [
    nodes(4, 2, "context", capacity_factor=DROPPING),
    nodes(2, 4),
    nodes(2, 4, expert_buffer=4.0),
    replace(TWO_AXES, move="two-hops", capacity_factor=DROPPING, load_balanced=True),
]


@pytest.mark.parametrize("case", some(CASES, (0,)), ids=str)
def test_a_layer_in_two_hops_follows_the_definition(case: Case) -> None:
    expected_BLM, expected_E, kept_BLE = token_by_token(case.capacity_factor)
    result = result_of(case)
    np.testing.assert_allclose(result.out_BLM, expected_BLM, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(result.counts.by_expert, expected_E)
    assert int(result.counts.dropped) == expected_E.sum() - kept_BLE.sum()
    assert int(result.counts.overflow) == 0
    d_x_BLM, d_weights = dense_gradients(case.capacity_factor)
    np.testing.assert_allclose(result.d_x_BLM, d_x_BLM, rtol=0, atol=1e-5 * np.abs(d_x_BLM).max())
    for name, d in d_weights.items():
        if name != "router.bias":
            assert np.linalg.norm(result.d_weights[name] - d) <= 1e-5 * np.linalg.norm(d), name


def test_overflow_is_counted_and_contributes_nothing() -> None:
    """Buffers are full at a node, of what it sends on, and at a device: each token and assignment beyond one is counted."""
    result = result_of(nodes(4, 2, expert_buffer=0.5))
    assert int(result.counts.overflow) > 0
    np.testing.assert_array_equal(result.counts.by_expert, token_by_token(None)[2].sum(axis=(0, 1)))
    assert np.all(np.isfinite(result.out_BLM))
    assert np.all(np.isfinite(result.d_x_BLM))
    assert np.abs(result.out_BLM - token_by_token(None)[0]).max() > 1e-3


def test_the_program_sends_over_each_axis_what_the_plan_says() -> None:
    """On a CPU in chunks: tokens with their experts and weights over nodes, and rows of experts inside, there and back."""
    case = nodes(2, 4)
    compiled, plan = compiled_layer(case)
    first, last = token_hops(plan.request, plan.mesh)
    assert first.chunk == ROWS // 8 * LENGTH
    sent: Counter[tuple[str, int, str]] = Counter()
    for one in Program(compiled.as_text()).collectives(plan.mesh):
        if one.kind == "all-to-all":
            (axis,) = one.axes
            sent[axis, one.bytes_per_device // 4, one.dtypes[0]] += one.count_per_step
    known = plan_of(case).request.table.top_k
    assert known is not None
    expected: Counter[tuple[str, int, str]] = Counter()
    of_plan = {("router.grouped", 0): EMBED, ("router.grouped_experts", 0): known, ("router.weights", 0): known}
    for row in plan.collectives:
        if row.component == "moe" and row.kind == "all-to-all" and row.phase != "recompute":
            hop = first if row.axes == first.axes else last
            width = of_plan.get((row.tensors[0], 0), EMBED)
            assert row.bytes_per_device == hop.even_rows * width * 4
            dtype = "int32" if row.tensors[0] == "router.grouped_experts" else "float32"
            # Of one of the two layers of the plan.
            sizes = plan.mesh.size(hop.axes) * hop.chunk * width
            expected[row.axes[0], sizes, dtype] += row.count_per_step // plan.by_name["router.grouped"].num
    assert sent == expected


@pytest.mark.matrix
def test_stages_train_as_one_device() -> None:
    case = Staged(
        model=DEEPSEEK3,
        layout="pp-ep-nodes",
        mesh="stage=2,fsdp=1,node=2,expert=2",
        microbatches=2,
        stages="Ett|tL",
    )
    assert_trains_as(case, case.alone)


@pytest.mark.matrix
@pytest.mark.parametrize("remat", ["full", "keep=moe.dispatched,host=router.returned"])
def test_a_step_has_the_collectives_of_the_plan(remat: str) -> None:
    case = replace(of_sameness(MIXTRAL, "ep-nodes", "fsdp=2,node=2,expert=2"), remat=remat)
    assert_program_is_the_plan(compiled_step(case).as_text() or "", plan_of_step(case))
    assert_trains_as(case, case.alone)
