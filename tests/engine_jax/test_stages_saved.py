"""Checkpoints of stages on JAX: layers by their numbers, whatever stage had them, and no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from shardwright.checkpoint import open_checkpoint
from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.delayed import HISTORY
from shardwright.core.recipes.presets import preset
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import load_state, own_boxes
from shardwright.engine_jax.training.state import Tensor, initial_state, make_state, tensors_of
from tests.engine_jax.commands import (
    assert_close,
    compiled_once,
    directory_of,
    losses,
    results,
    saved,
    train,
)

MODEL = [
    "llama3-test",
    "--set",
    "num_layers=3",
    "embed=64",
    "mlp=128",
    "tied=true",
    "--length",
    "32",
    "--data",
    __file__,
]
STEPS = ["--steps", "4", "--seed", "5", "--lr", "3e-3", "--stop-after"]
STAGED = ["--layout", "pp", "--mesh", "stage=2,fsdp=2", "--microbatches", "2", "--stages", "Ett|tL"]
TABLE = sw.model_table("llama3-test", {"num_layers": "3", "embed": "64", "mlp": "128", "tied": "true"})


def plan_of(layout: str, mesh: str, stages: str | None = None) -> Plan:
    request = sw.Request(
        layout=sw.load_layout(layout),
        table=TABLE,
        batch=8,
        length=32,
        mesh_sizes=mesh_sizes(mesh),
        microbatches=4,
        stages=stages,
    )
    return sw.make_plan(request)


LAYOUTS = {
    "none": plan_of("fsdp", "fsdp=2"),
    "4 stages": plan_of("pp", "stage=4,fsdp=2", "E|tt|t|L"),
    "2 stages": plan_of("pp", "stage=2,fsdp=1", "Et|ttL"),
    "2 stages of each": plan_of("pp", "stage=2,fsdp=2", "Et|t|t|L"),
    "3 stages": plan_of("pp", "stage=3,fsdp=2"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run in two stages that was stopped after two of four steps."""
    out = tmp_path_factory.mktemp("stages") / "out"
    with compiled_once():
        assert train(MODEL, out, *STAGED, *STEPS, "2") == 0
    return out


def in_full(plan: Plan, state) -> dict[str, np.ndarray]:
    """Every tensor that a state saves, put together from the boxes of all devices, each element from exactly one."""
    arrays: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    mesh = device_mesh(plan.mesh)
    tensors = {name: tensor.stacked_saved_shape for name, tensor in plan.by_name.items() if tensor.kind == "weight"}
    for one in own_boxes(state, plan, mesh):
        shape = tensors[one.name.rpartition("/")[2]]
        array = one.array()
        arrays.setdefault(one.name, np.zeros(shape, array.dtype))[one.box.slices] = array
        counts.setdefault(one.name, np.zeros(shape, np.int32))[one.box.slices] += 1
    assert all((count == 1).all() for count in counts.values())
    return arrays


@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_in_stages_and_loaded(run: Path, name: str) -> None:
    plan = LAYOUTS[name]
    state = load_state(open_checkpoint(directory_of(run, 2)), plan, device_mesh(plan.mesh))
    found, wanted = in_full(plan, state), saved(run, 2)
    assert found.keys() == wanted.keys()
    for tensor, array in wanted.items():
        assert found[tensor].tobytes() == array.tobytes(), tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_initial_values_are_those_of_the_layers_numbers(name: str) -> None:
    found, wanted = (
        in_full(plan, initial_state(plan, device_mesh(plan.mesh), 3)) for plan in (LAYOUTS[name], LAYOUTS["none"])
    )
    for tensor, array in wanted.items():
        assert found[tensor].tobytes() == array.tobytes(), tensor


def test_histories_have_the_numbers_of_the_layers() -> None:
    """In stages of one and of two layers, the last of which is not quantized."""
    recipe = replace(preset("fp8-delayed"), high_layers=1)
    plan = sw.make_plan(replace(LAYOUTS["2 stages"].request, precision=recipe))
    mesh = device_mesh(plan.mesh)
    wanted = {
        one.name: np.arange(prod(one.saved), dtype=one.dtype).reshape(one.saved) for one in tensors_of(plan, mesh)
    }

    def read(tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
        return [wanted[tensor.name][box.slices] for box in boxes]

    found = {name: np.zeros_like(array) for name, array in wanted.items()}
    for one in own_boxes(make_state(plan, mesh, read, 0), plan, mesh):
        found[one.name][one.box.slices] = one.array()
    histories = [name for name in wanted if name.startswith(HISTORY + "layers.")]
    assert {found[name].shape[0] for name in histories} == {2}
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_resumed_without_stages(run: Path, tmp_path: Path) -> None:
    """Two steps in stages and two without are four without."""
    alone = ["--layout", "fsdp", "--mesh", "fsdp=2"]
    with compiled_once():
        assert train(MODEL, tmp_path / "straight", *alone, *STEPS, "4") == 0
        assert train(MODEL, run, *alone, *STEPS, "4", "--resume") == 0
    assert [step for step, *_ in results(run)] == [1, 2, 3, 4]
    np.testing.assert_allclose(losses(run), losses(tmp_path / "straight"), rtol=1e-5)
    assert_close(saved(run, 4), saved(tmp_path / "straight", 4), 1e-4)
