"""Stages on JAX: trained as on one device; the program has the collectives and the FLOPs of the plan."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from shardwright.core.pipeline.program import stage_program
from shardwright.core.plan.memory import kept_runs, saved_by_layers
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.stages.kept import Live
from shardwright.engine_jax.stages.loop import _Device
from shardwright.engine_jax.stages.passes import Prepared
from shardwright.engine_jax.training.state import abstract_state
from shardwright.engine_jax.training.step import abstract_batch, train_step
from tests.engine_jax.program import (
    assert_amaxes_are_planned,
    assert_program_is_the_plan,
    assert_steps_are_planned,
)
from tests.engine_jax.steps import OPTIONS, Case, assert_trains_as, compiled_step, plan_of
from tests.matrix import some
from tests.sameness.cases import LLAMA3, MIXTRAL
from tests.sameness.stage_cases import KEPT, STAGED

DEFAULT = (0, 1, 5, 14, 17, 19, 24)
"""Those of `make test`. In the third one a rank has two different neighbours; the fourth one has a ring of attention; in the next one
weights stay gathered; then live microbatches keep the products of layers; in the last one all stages share both ends."""

LOW = (
    # One layer of two stays high, and so one of the stages.
    Case(model=LLAMA3, layout="pp", mesh="stage=2,fsdp=2", microbatches=2, precision="fp8-delayed high_layers=1"),
    Case(
        model=LLAMA3,
        layout="pp",
        mesh="stage=2,fsdp=2",
        microbatches=2,
        precision="nvfp4 high_layers=1",
        settings="num_layers=3",
        stages="Ett|tL",
    ),
    Case(model=MIXTRAL, layout="pp-ep", mesh="stage=2,fsdp=1,expert=2", microbatches=2, precision="fp8-delayed"),
    Case(
        model=LLAMA3,
        layout="pp-cp",
        mesh="stage=2,fsdp=1,context=2",
        microbatches=2,
        precision="fp8-current",
        move="attention=ring",
    ),
    Case(
        model=LLAMA3,
        layout="pp",
        mesh="stage=2,fsdp=2",
        microbatches=2,
        precision="fp8-delayed high_layers=1",
        remat="dots",
    ),
)
"""Under recipes of low precision."""

WITHOUT = {"pp": "fsdp", "pp-ep": "ep", "pp-cp": "cp"}
"""The layout of the same roles without stages."""


def without_stages(case: Case) -> Case:
    """The same microbatches under the same roles on the mesh without the stage axis."""
    return replace(case, layout=WITHOUT[case.layout], mesh=case.mesh.partition(",")[2], stages="")


@pytest.mark.matrix
def test_the_loss_in_chunks_changes_nothing() -> None:
    """Both gradients are made in the tick that has the loss."""
    case = replace(STAGED[0], loss_chunks=4)
    assert_trains_as(case, case.alone)
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize("case", some(STAGED, DEFAULT), ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


@pytest.mark.parametrize("case", some(STAGED, DEFAULT), ids=str)
def test_a_step_has_the_collectives_and_the_flops_of_the_plan(case: Case) -> None:
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize("case", some(KEPT, (0,)), ids=str)
def test_live_microbatches_keep_what_is_planned(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In arrays with a place for each slot and layer."""
    plain, kept = _Device.no_live, []

    def no_live(device: _Device, x_BLM: jax.Array, given: Prepared) -> Live:
        live = plain(device, x_BLM, given)
        kept.append(sum(array.nbytes for array in jax.tree.leaves(live)))
        return live

    monkeypatch.setattr(_Device, "no_live", no_live)
    plan = plan_of(case)
    mesh, program = device_mesh(plan.mesh), stage_program(plan)
    train_step(plan, mesh, OPTIONS).lower(abstract_state(plan, mesh), abstract_batch(plan, mesh))
    assert plan.program is not None
    assert program is not None
    held = plan.program
    runs = kept_runs(held.request, held.mesh, held.tensors)
    assert kept == [program.ticks.slots * saved_by_layers(held.request, held.mesh, held.tensors, runs)]


@pytest.mark.parametrize("case", some(LOW, (0,)), ids=str)
def test_a_recipe_quantizes_as_without_stages(case: Case) -> None:
    """Another scale or code of an element would move gradients a hundred times further."""
    assert_trains_as(case, without_stages(case))
    assert_program_is_the_plan(compiled_step(case).as_text(), plan_of(case))
    assert_amaxes_are_planned(compiled_step(case).as_text(), plan_of(case))
