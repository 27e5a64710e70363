"""A model folder that is read directly: what several devices or processes need is read once, bit for bit."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from shardwright.checkpoint.exchange.passing import read_together
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.interop.hugging_face.weights import elements
from shardwright.interop.hugging_face.weights.direct import FolderWeights, open_model_folder
from shardwright.interop.hugging_face.weights.files.safetensors_file import FoundTensor
from shardwright.layouts import load_layout
from tests.checkpoint.test_passing import by_all
from tests.interop.published_folder import Made, made_folder

SETTINGS = {"num_layers": "2", "embed": "32", "mlp": "48", "num_heads": "4", "num_kv_heads": "2", "vocab": "96"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_folder(tmp_path_factory.mktemp("direct") / "folder", "mixtral-test", SETTINGS)


@pytest.fixture
def weights(made: Made) -> FolderWeights:
    request = Request(layout=load_layout("fsdp"), table=made.table, batch=8, length=32, mesh_sizes={"fsdp": 4})
    opened = open_model_folder(made.path, make_plan(request))
    assert opened is not None
    return opened[0]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each read of a published tensor had."""
    monkeypatch.setattr(elements, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr("shardwright.interop.hugging_face.weights.direct.CHUNK_ELEMENTS", 500)
    found: list[int] = []
    original = FoundTensor.read

    def counted(self: FoundTensor, start: int, size: int) -> np.ndarray:
        found.append(size)
        return original(self, start, size)

    monkeypatch.setattr(FoundTensor, "read", counted)
    return found


def blocks(shape: tuple[int, ...], dim: int, num: int) -> list[Box]:
    whole, step = Box.whole(shape), -(-shape[dim] // num)
    return [
        Box(
            (*whole.start[:dim], at, *whole.start[dim + 1 :]),
            (*shape[:dim], min(at + step, shape[dim]), *shape[dim + 1 :]),
        )
        for at in range(0, shape[dim], step)
    ]


def test_what_several_devices_need_is_read_once(weights: FolderWeights, made: Made, read: list[int]) -> None:
    for weight in made.table.weights:
        array = made.weights[weight.name]
        for dim in range(array.ndim):
            boxes = [*blocks(array.shape, dim, 3), Box.whole(array.shape)]
            read.clear()
            for box, found in zip(boxes, weights.read_boxes(weight.name, boxes), strict=True):
                np.testing.assert_array_equal(found, array[box.slices], err_msg=f"{weight.name} {box}")
            assert sum(read) == array.size, (weight.name, dim)


def test_stored_boxes_cover_each_tensor_once(weights: FolderWeights, made: Made, read: list[int]) -> None:
    del read
    for weight in made.table.weights:
        stored = weights.stored(weight.name)
        found = np.zeros(made.weights[weight.name].shape, int)
        for number in range(len(stored.starts)):
            found[stored.box(number).slices] += 1
        assert (found == 1).all(), weight.name


def test_what_several_processes_need_is_read_once(weights: FolderWeights, made: Made, read: list[int]) -> None:
    for weight in made.table.weights:
        array = made.weights[weight.name]
        boxes = blocks(array.shape, array.ndim - 1, 2)
        # Two replicas of each block.
        needed = {process: boxes[process % len(boxes)] for process in range(2 * len(boxes))}
        wants = wants_of(needed.items())
        read.clear()
        found = by_all(
            len(needed),
            lambda carrier, name=weight.name, needed=needed, wants=wants: read_together(
                weights, name, [needed[carrier.index]], wants, carrier
            ),
        )
        for process, [one] in enumerate(found):
            np.testing.assert_array_equal(one, array[needed[process].slices], err_msg=weight.name)
        assert sum(read) == prod(array.shape), weight.name
