"""Weights that rest as codes: a run has the losses, the gradients and the checkpoints, to the bit, of one with the same recipe and the same
master weights, whose codes are made where they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import own_boxes
from shardwright.engine_jax.training.state import State, Tensor, make_state, tensors_of
from shardwright.engine_jax.training.step import batch_sharding
from tests.engine_jax import steps
from tests.engine_jax.steps import OPTIONS, Case, batches_of, compile_plan, in_row_order, plan_of, recipe_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled, in_words
from tests.engine_torch.training import gone_on, kept_after
from tests.matrix import rest, some
from tests.sameness.bounds import EVERY_EXPERT
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

STEPS = 2
MASTER: dict[str, Any] = {"weights_dtype": "bfloat16", "master_dtype": "float32"}
LAYOUTS = {
    (LLAMA3, "hsdp", "data=2,fsdp=2"): ("fp8-block", "mxfp8", "fp8-current", "nvfp4"),
    (LLAMA3, "fsdp-tp", "fsdp=2,tensor=2"): ("fp8-row", "fp8-current"),
    (MIXTRAL, "ep", "fsdp=2,expert=2"): ("fp8-current", "fp8-row dispatch_quantized=1"),
    (DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2"): ("fp8-row",),
    (LLAMA3, "hsdp-zero1", "data=2,fsdp=2"): ("fp8-block",),
    (LLAMA3, "hsdp-zero2", "data=2,fsdp=2"): ("fp8-current",),
}


def quantizing(model: str, layout: str, mesh: str, precision: str) -> Case:
    one = case(model, layout, mesh, settings=EVERY_EXPERT.get(model, ""))
    return replace(one, precision=precision, microbatches=1)


CASES = [quantizing(*layout, name) for layout, names in LAYOUTS.items() for name in names]


STAGED = [
    replace(quantizing(LLAMA3, "pp", "stage=2,fsdp=2", name), microbatches=2) for name in ("fp8-current", "fp8-block")
]


def planned(case: Case, how: str, engine: str, **changed: Any) -> Plan:
    """The plan of a case whose weights are gathered as codes, or rest as codes."""
    recipe = recipe_of(f"{case.precision} {how}=1")
    request = replace(plan_of(replace(case, precision="")).request, engine=engine, precision=recipe, **MASTER)  # pyright: ignore[reportArgumentType]
    plan = make_plan(replace(request, **changed))
    assert not plan.errors, plan.errors
    return plan


@pytest.mark.parametrize("case", some([*CASES, *STAGED], {0}), ids=in_words)
def test_a_run_of_ranks_is_that_of_codes_made_where_they_are_gathered(case: Case, four: Ranks) -> None:
    found = []
    for how in ("gather_quantized", "rest_quantized"):
        plan = planned(case, how, "torch")
        batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case, STEPS)]
        runs = four.run(kept_after, plan, case.seed, OPTIONS, batches)
        found.append((assembled([before for before, _ in runs]), assembled([after for _, after in runs])))
    for gathered, rested in zip(*found, strict=True):
        assert gathered.keys() == rested.keys()
        for name, array in gathered.items():
            np.testing.assert_array_equal(rested[name], array, err_msg=name)


IN_FLOAT = quantizing(LLAMA3, "hsdp", "data=2,fsdp=2", "fp8-current")
BEGIN_OR_CEASE = [
    ("gather_quantized", "rest_quantized", IN_FLOAT),
    rest("rest_quantized", "gather_quantized", IN_FLOAT),
    rest("rest_quantized", "rest_quantized", IN_FLOAT),
    rest("rest_quantized", "rest_quantized", STAGED[0]),
    rest("rest_quantized", "rest_quantized", quantizing(LLAMA3, "hsdp-zero1", "data=2,fsdp=2", "fp8-block")),
]
"""The option before a save and after the load."""


def ran(
    ranks: Ranks, case: Case, plan: Plan, steps: slice, before: Path | None, after: Path | None = None, **more: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and the state after some steps of a run."""
    batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case, STEPS + 1)[steps]]
    found = ranks.run(partial(gone_on, **more), plan, case.seed, OPTIONS, batches, before, after)
    return found[-1][0], assembled([boxes for _, boxes in found])


def assert_same_bits(found: Mapping[str, np.ndarray], needed: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == needed.keys()
    for name, array in needed.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(("first", "then", "case"), BEGIN_OR_CEASE, ids=str)
def test_ranks_go_on_with_codes_or_without_from_any_checkpoint(
    first: str, then: str, case: Case, four: Ranks, tmp_path: Path
) -> None:
    losses, whole = ran(four, case, planned(case, "rest_quantized", "torch"), slice(None), None)
    ran(four, case, planned(case, first, "torch"), slice(0, STEPS), None, tmp_path)
    resumed, after = ran(four, case, planned(case, then, "torch"), slice(STEPS, None), tmp_path)
    assert resumed == losses[STEPS:]
    assert_same_bits(after, whole)


@pytest.mark.matrix
def test_ranks_of_another_mesh_load_what_rests_as_codes_and_its_weights_begin_another_run(
    four: Ranks, tmp_path: Path
) -> None:
    case = IN_FLOAT
    losses, _ = ran(four, case, planned(case, "rest_quantized", "torch"), slice(None), None)
    ran(four, case, planned(case, "rest_quantized", "torch"), slice(0, STEPS), None, tmp_path)
    other = planned(case, "rest_quantized", "torch", mesh_sizes={"data": 1, "fsdp": 4})
    [loss], _ = ran(four, case, other, slice(STEPS, None), tmp_path)
    # Sums of gradients are in another order.
    assert loss == pytest.approx(losses[-1], rel=1e-6)
    (rested, after), (gathered, needed) = (
        ran(four, case, planned(case, how, "torch"), slice(STEPS, None), tmp_path, weights_only=True)
        for how in ("rest_quantized", "gather_quantized")
    )
    assert rested == gathered
    assert_same_bits(after, needed)


def trained(plan: Plan, case: Case) -> tuple[State[jax.Array], list[float]]:
    mesh, step = device_mesh(plan.mesh), compile_plan(plan)
    state: State[jax.Array] = make_state(plan, mesh, partial(steps._initial_boxes, plan, case.seed), 0)
    losses = []
    for batch in batches_of(case, STEPS):
        ordered = in_row_order(batch, plan).items()
        state, metrics = step(state, {n: jax.device_put(array, batch_sharding(plan, mesh)) for n, array in ordered})
        losses.append(float(metrics.loss))
    return state, losses


def saved(state: State[jax.Array], plan: Plan) -> Mapping[str, np.ndarray]:
    """What a checkpoint has of a state."""
    found: dict[str, np.ndarray] = {}
    mesh = device_mesh(plan.mesh)
    shapes = {one.name: one.saved for one in tensors_of(plan, mesh)}
    for one in own_boxes(state, plan, mesh):
        array = one.array() if callable(one.array) else one.array
        found.setdefault(one.name, np.zeros(shapes.get(one.name, array.shape), array.dtype))[one.box.slices] = array
    return found


@pytest.mark.parametrize("case", some(CASES, {0}), ids=in_words)
def test_a_run_of_jax_is_too_and_what_it_loads_has_the_same_codes_on_every_mesh(case: Case) -> None:
    (gathered, losses), (rested, same) = (
        trained(planned(case, how, "jax"), case) for how in ("gather_quantized", "rest_quantized")
    )
    assert losses == same
    plan = planned(case, "rest_quantized", "jax")
    before, after = saved(gathered, planned(case, "gather_quantized", "jax")), saved(rested, plan)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert rested.resting
    sizes = {"fsdp": 1, **dict.fromkeys(plan.request.mesh_sizes, 1)}
    for other in (plan, planned(case, "rest_quantized", "jax", mesh_sizes=sizes)):

        def read(tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
            return [after[tensor.name][box.slices] for box in boxes]

        loaded = make_state(other, device_mesh(other.mesh), read, STEPS, {})
        for ours, theirs in zip(jax.tree.leaves(loaded.resting), jax.tree.leaves(rested.resting), strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
