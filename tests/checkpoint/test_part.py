"""Merged part files of several processes: boxes are in the order of their starts, whichever process wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwright.checkpoint.format.manifest import StoredBox, TensorInfo
from shardwright.checkpoint.format.part import Part, merge
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import random_partition


def test_a_manifest_does_not_depend_on_which_process_wrote_a_box() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        shapes = {"embed": (9, 7), "scale": (6,), "count": ()}
        infos = tuple(TensorInfo(name=n, shape=shape, dtype="float32", spec="") for n, shape in shapes.items())
        parts = [Part(infos=infos) for _ in range(3)]
        starts: dict[str, list[tuple[int, ...]]] = {name: [] for name in shapes}
        for name, shape in shapes.items():
            boxes = random_partition(rng, Box.whole(shape), 6)
            starts[name] = [box.start for box in boxes]
            for number in rng.permutation(len(boxes)):
                process = int(rng.integers(len(parts)))
                stored = StoredBox(
                    box=boxes[number], file=f"of-{process}", key=name, offset=0, num_bytes=4, digest=f"{process}"
                )
                part = parts[process]
                parts[process] = Part(infos=infos, files=part.files, boxes=(*part.boxes, (name, stored)))
        files, tensors = merge(Path("step-1"), parts)
        assert files == ()
        assert [tensor.info for tensor in tensors] == list(infos)
        for tensor in tensors:
            assert [stored.box.start for stored in tensor.boxes] == sorted(starts[tensor.info.name])
