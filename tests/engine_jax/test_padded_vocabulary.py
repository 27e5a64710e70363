"""A vocabulary that its axes do not divide: padded in memory, and nowhere else.

The run alone has no padding, so it is the oracle of losses, gradients and norms.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import RunPoint, open_checkpoint, save_checkpoint
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import infos_of, load_state, own_boxes
from shardwright.engine_jax.training.state import Tensor, arrays_of, make_state, tensors_of
from tests.engine_jax.steps import Case, assert_trains_as, plan_of
from tests.matrix import some
from tests.sameness.cases import LLAMA3, MIXTRAL

SMALL = "num_layers=1,vocab=257"
TIED = f"{SMALL},tied=true"
TRAINED = [
    Case(model=LLAMA3, layout="fsdp-tp", mesh="fsdp=2,tensor=4", settings=SMALL),
    # The logits shard it over tensor, and so does the only weight that has it.
    Case(model=LLAMA3, layout="tp", mesh="data=2,tensor=4", settings=TIED, microbatches=2),
    # Three of eight devices have padding only.
    Case(model=LLAMA3, layout="tp", mesh="tensor=8", settings="num_layers=1,vocab=5"),
    # Stored over axes that do not divide it, and gathered with its padding.
    Case(model=LLAMA3, layout="vocabulary-stored-by-rule", mesh="fsdp=8", settings=SMALL),
    # Each device takes its slice of the tied embedding for the logits.
    Case(model=LLAMA3, layout="vocabulary-of-the-logits", mesh="fsdp=2,tensor=4", settings=TIED),
    Case(model=MIXTRAL, layout="tp-as-ep", mesh="fsdp=2,tensor=4", settings=SMALL),
]


@pytest.mark.parametrize("case", some(TRAINED, range(1, 4)), ids=str)
def test_trains_as_one_device(case: Case) -> None:
    row = plan_of(case).by_name["embedding.tokens"]
    assert row.unpadded is not None
    assert row.unpadded[0] < row.shape[0]
    assert_trains_as(case, case.alone)


LAYOUTS = [
    Case(model=LLAMA3, layout="fsdp", mesh="fsdp=1", settings=SMALL),
    Case(model=LLAMA3, layout="fsdp", mesh="fsdp=8", settings=SMALL),
    Case(model=LLAMA3, layout="tp", mesh="data=2,tensor=4", settings=SMALL),
    Case(model=LLAMA3, layout="fsdp-tp", mesh="fsdp=4,tensor=2", settings=SMALL),
    Case(model=LLAMA3, layout="tp", mesh="tensor=8", settings=SMALL),
]
POINT = RunPoint(step=3, seed=0, data_position=24, model="m", layout_name="l", layout_text="", mesh={})


def values_of(tensor: Tensor) -> np.ndarray:
    """Values of a tensor of the state, all of them different and none of them zero."""
    size = int(np.prod(tensor.saved))
    return (np.arange(1, size + 1) + 7 * len(tensor.name)).reshape(tensor.saved).astype(tensor.dtype)


def held(plan: Plan, folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a state that is loaded under a plan, with padding."""
    loaded = load_state(open_checkpoint(folder), plan, device_mesh(plan.mesh))
    return {name: np.asarray(array) for name, array in arrays_of(loaded).items()}


@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_a_checkpoint_has_no_padding_and_loads_under_any_layout(saved: Case, tmp_path: Path) -> None:
    plan = plan_of(saved)
    mesh = device_mesh(plan.mesh)
    state = make_state(plan, mesh, lambda tensor, boxes: [values_of(tensor)[box.slices] for box in boxes], 3)
    folder = save_checkpoint(tmp_path, POINT, infos_of(plan, mesh), list(own_boxes(state, plan, mesh)))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["embedding.tokens"].shape == (257, 256)
    assert checkpoint.tensors["logits.kernel"].shape == (256, 257)
    whole = {tensor.name: values_of(tensor) for tensor in tensors_of(plan, mesh)}
    for name, values in whole.items():
        assert np.array_equal(checkpoint.read_box(name), values), name
    for case in LAYOUTS:
        arrays = held(plan_of(case), folder)
        assert arrays.keys() == whole.keys()
        for name, array in arrays.items():
            inside = Box.whole(whole[name].shape).slices
            assert np.array_equal(array[inside], whole[name]), name
            padding = array.copy()
            padding[inside] = 0
            assert not padding.any(), name
            assert array.size == whole[name].size or "tensor" in case.mesh
