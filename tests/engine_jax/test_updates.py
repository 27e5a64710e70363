"""Updates that axes shard and weights that they do not, on JAX: training is as on one device, and the program has the plan's collectives.

On PyTorch: ``tests/engine_torch/test_layouts_agree.py`` and ``test_dry_run.py``.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from shardwright.core.mesh.notation import parse
from shardwright.core.planning import make_plan
from tests.engine_jax.program import assert_steps_are_planned
from tests.engine_jax.steps import Case, assert_same, compiled_step, plan_of, run_of
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

STAGES = replace(case(LLAMA3, "stages-zero1", "stage=2,data=2"), microbatches=4, rows=16)
CASES = [
    case(LLAMA3, "zero1", "data=4"),
    case(LLAMA3, "zero2", "data=4", settings="tied=true"),
    case(LLAMA3, "hsdp-zero1", "data=2,fsdp=2"),
    case(LLAMA3, "hsdp-zero2", "data=2,fsdp=2"),
    # A gradient is sharded over one axis in each microbatch, and over the other one after the last.
    case(LLAMA3, "zero-tp", "data=2,replica=2,tensor=2"),
    case(MIXTRAL, "zero-ep", "data=2,fsdp=2,expert=2"),
    case(DEEPSEEK3, "zero-ep", "data=2,fsdp=1,expert=2"),
    STAGES,
    # Weights that stay gathered, and are not gathered again.
    case(LLAMA3, "kept", "fsdp=4"),
    case(LLAMA3, "kept-tp", "data=1,fsdp=2,tensor=2"),
    case(MIXTRAL, "kept-ep", "fsdp=2,expert=2"),
]


@pytest.mark.parametrize("case", some(CASES, {4, 5, 10}), ids=lambda case: f"{case.model} {case}")
def test_trains_as_one_device(case: Case) -> None:
    assert_same(run_of(case), run_of(case.alone), case.tolerance)
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_weights_that_stay_gathered_are_gathered_once(remat: str) -> None:
    kept, again = (
        make_plan(replace(plan_of(case(LLAMA3, layout, "fsdp=4")).request, remat=remat)) for layout in ("kept", "fsdp")
    )
    assert [one for one in kept.collectives if one.phase == "recompute"] == []
    assert [one for one in again.collectives if one.phase != "recompute"] == list(kept.collectives)
    # Both layers in use: 256 x 256 of queries and outputs, of keys and values by their heads, and the feed-forward layer.
    matrices = sum(row.num * prod(row.shape) for row in kept.weights if row.stack and len(row.shape) > 1)
    norms = sum(row.num * prod(row.shape) for row in kept.weights if row.stack and len(row.shape) == 1)
    assert kept.memory.activations_bytes - again.memory.activations_bytes in (4 * matrices, 4 * (matrices + norms))


def test_the_specs_of_updates() -> None:
    rows = plan_of(case(LLAMA3, "zero-tp", "data=2,replica=2,tensor=2")).by_name
    down = rows["layers.mlp.down"]
    assert (down.at_rest, down.in_update) == (parse("mlp/tensor embed"), parse("mlp/tensor embed/data/replica"))
    assert dict(down.gradient) == {"data": "reduce-scatter", "replica": "reduce-scatter"}
    # It has one dim: it stays whole, and so does its update.
    norm = rows["layers.residual.attention_norm"]
    assert (norm.at_rest, norm.in_update) == (parse("norm"), parse("norm"))
    assert set(norm.gradient.values()) == {"all-reduce"}


def test_memory_of_updates() -> None:
    """What an axis shards is a fraction, but for the norms."""
    plans = {
        layout: make_plan(plan_of(case(LLAMA3, layout, "data=4")).request).memory
        for layout in ("ddp", "zero1", "zero2")
    }
    norms = 4 * (2 * 2 + 1) * 256
    ddp, zero1, zero2 = plans["ddp"], plans["zero1"], plans["zero2"]
    assert zero1.weights_bytes == zero2.weights_bytes == ddp.weights_bytes
    assert zero1.gradients_bytes == ddp.gradients_bytes
    assert zero2.gradients_bytes - norms == (ddp.gradients_bytes - norms) // 4
    assert zero1.optimizer_bytes == zero2.optimizer_bytes
    assert zero1.optimizer_bytes - 2 * norms == (ddp.optimizer_bytes - 2 * norms) // 4
