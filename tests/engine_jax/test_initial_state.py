"""The state before the first step: the same bits on any layout, each box made once, moments zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, RunPoint, open_checkpoint, save_checkpoint
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import infos_of, load_state, own_boxes
from shardwright.engine_jax.training.state import State, arrays_of, box_of, initial_state, make_state, tensors_of
from shardwright.init import box_values
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.core.received import held_boxes
from tests.engine_jax.steps import Case, plan_of

LAYOUTS = [
    ("ddp", "data=8"),
    ("fsdp", "fsdp=8"),
    ("hsdp", "data=4,fsdp=2"),
    ("tp", "data=2,tensor=4"),
    ("fsdp-tp", "fsdp=4,tensor=2"),
    ("cp", "fsdp=2,context=4"),
    ("ep", "fsdp=2,expert=4"),
    ("ep-as-cp", "fsdp=2,expert=4"),
]


def state_of(case: Case) -> State:
    plan = plan_of(case)
    return initial_state(plan, device_mesh(plan.mesh), seed=7)


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_every_layout_begins_with_the_same_bits(model: str) -> None:
    alone = Case(model=model, layout="fsdp", mesh="fsdp=1")
    expected = {name: np.asarray(array) for name, array in arrays_of(state_of(alone)).items()}
    for weight in plan_of(alone).request.table.weights:
        array = expected[weight.name]
        np.testing.assert_array_equal(array, box_values(weight, 7, Box.whole(array.shape)))
    for name, array in expected.items():
        assert np.any(array) != name.startswith("moments") or name.endswith("router.bias"), name
    layouts = [layout for layout in LAYOUTS if model != "llama3-test" or not layout[0].startswith("ep")]
    for layout, mesh in layouts:
        state = state_of(Case(model=model, layout=layout, mesh=mesh))
        assert int(state.step) == 0
        arrays = arrays_of(state)
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == expected[name][shard.index].tobytes(), (layout, name)


def test_another_seed_is_another_model() -> None:
    plan = plan_of(Case(model="llama3-test", layout="fsdp", mesh="fsdp=8"))
    first, second = (initial_state(plan, device_mesh(plan.mesh), seed) for seed in (0, 1))
    assert not np.array_equal(first.weights["layers.mlp.up"], second.weights["layers.mlp.up"])


@pytest.mark.parametrize(("layout", "mesh"), LAYOUTS[:4])
def test_each_box_is_read_once_by_a_device_that_has_it(layout: str, mesh: str) -> None:
    plan = plan_of(Case(model="mixtral-test", layout=layout, mesh=mesh))
    devices = device_mesh(plan.mesh)
    reads: Counter[tuple[str, Box]] = Counter()

    def read(tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
        reads.update((tensor.name, box) for box in boxes)
        return [np.zeros(box.shape, tensor.dtype) for box in boxes]

    state = make_state(plan, devices, read, step=3)
    assert int(state.step) == 3
    specs = {weight.name: weight.stacked_at_rest for weight in plan.weights}
    expected = Counter(
        (tensor.name, held.box)
        for tensor in tensors_of(plan, devices)
        for held in held_boxes(owned_boxes(specs[tensor.weight], plan.mesh, tensor.shape))
    )
    assert reads == expected
    # Of replicas, the one that is the first in JAX saves.
    saved = Counter((one.name, one.box) for one in own_boxes(state, plan, devices))
    firsts = {
        (name, box_of(shard.index, array.shape))
        for name, array in arrays_of(state).items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }
    assert saved == expected == Counter(firsts)


def test_moments_and_weights_have_the_requested_dtypes() -> None:
    plan = plan_of(Case(model="deepseek3-test", layout="ep", mesh="fsdp=2,expert=4"))
    plan = make_plan(replace(plan.request, weights_dtype="bfloat16", moments_dtype="bfloat16"))
    state = initial_state(plan, device_mesh(plan.mesh), seed=7)
    for name, array in {**state.weights, **state.first, **state.second}.items():
        assert array.dtype == jnp.bfloat16, name
    assert {array.dtype for array in state.buffers.values()} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("mlp", [128, 512])
def test_a_state_of_another_model_is_refused_before_it_is_read(mlp: int, tmp_path: Path) -> None:
    """A checkpoint of a larger model would have every box of a smaller one."""
    plan, other = (plan_of_width(width) for width in (256, mlp))
    mesh = device_mesh(plan.mesh)
    point = RunPoint(step=1, seed=0, data_position=0, model="a", layout_name="fsdp", layout_text="", mesh={"fsdp": 2})
    infos, boxes = infos_of(plan, mesh), own_boxes(initial_state(plan, mesh, 0), plan, mesh)
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, point, infos, boxes))
    assert load_state(checkpoint, plan, mesh).weights.keys() == {row.name for row in plan.weights}
    with pytest.raises(CheckpointError, match=f"layers.mlp.(up|gate|down).*{mlp}"):
        load_state(checkpoint, other, mesh)


def plan_of_width(mlp: int) -> Plan:
    table = build("llama3-test", {"num_layers": "1", "embed": "64", "mlp": str(mlp)})
    return make_plan(Request(layout=load_layout("fsdp"), table=table, batch=2, length=16, mesh_sizes={"fsdp": 2}))


@pytest.mark.parametrize(("layout", "mesh"), LAYOUTS)
def test_the_core_knows_the_boxes_of_each_device(layout: str, mesh: str) -> None:
    plan = plan_of(Case(model="deepseek3-test" if layout.startswith("ep") else "llama3-test", layout=layout, mesh=mesh))
    devices = device_mesh(plan.mesh)
    saved: Counter[tuple[str, Box]] = Counter()
    for number, device in enumerate(devices.devices.flat):
        found = list(saved_boxes(plan, number))
        assert {(one.weight, one.box) for one in found} == {
            (tensor.name, box_of(tensor.sharding.devices_indices_map(tensor.shape)[device], tensor.shape))
            for tensor in tensors_of(plan, devices)
            if tensor.name == tensor.weight
        }
        saved.update((one.weight, one.box) for one in found if one.saves)
    assert set(saved.values()) == {1}
