"""Part files of several processes and their index: boxes are in the order of their starts, whichever process wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwright.checkpoint import TensorInfo
from shardwright.checkpoint.format.index import index_bytes, index_of, read_index
from shardwright.checkpoint.format.part import InfoTable, Part, StoredBox, StoredFile, part_bytes, read_part
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import random_partition

PIECE_BYTES = 24
HEADER_BYTES = 8


def part_with(rng: np.random.Generator, process: int, boxes: list[tuple[int, Box]], table: InfoTable) -> Part:
    """The part of a process that has written boxes of float32 tensors, each given with the number of its tensor."""
    rows: list[tuple[int, int, StoredBox]] = []
    offset = HEADER_BYTES
    for number, box in boxes:
        size = 4 * box.size
        digests = rng.integers(0, 256, (-(-size // PIECE_BYTES), 16)).astype(np.uint8)
        stored = StoredBox(info=table.infos[number], box=box, file="", offset=offset, num_bytes=size, digests=digests)
        rows.append((number, 0, stored))
        offset += size
    files = [StoredFile(name="", num_bytes=offset, header_bytes=HEADER_BYTES, header_digest=bytes(16))]
    data = part_bytes(files, rows, PIECE_BYTES)
    part, piece_bytes = read_part(Path(f"part-{process}"), data, process, table)
    assert piece_bytes == PIECE_BYTES
    for row, (_, _, stored) in enumerate(rows):
        found = part.box(row, table.infos)
        assert (found.info, found.box, found.offset, found.num_bytes) == (
            stored.info,
            stored.box,
            stored.offset,
            stored.num_bytes,
        )
        assert (found.digests == stored.digests).all()
        assert found.file == f"boxes-{process:05d}-00000.safetensors"
    return part


def test_an_index_does_not_depend_on_which_process_wrote_a_box() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        shapes = {"embed": (9, 7), "none": (0, 3), "scale": (6,), "count": ()}
        infos = [TensorInfo(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
        table = InfoTable.of(infos)
        boxes = {
            number: random_partition(rng, Box.whole(info.shape), 6) if 0 not in info.shape else []
            for number, info in enumerate(infos)
        }
        pairs = [(number, box) for number, each in boxes.items() for box in each]
        owners = rng.integers(0, 3, len(pairs)).tolist()
        order = rng.permutation(len(pairs)).tolist()
        parts = [
            part_with(rng, process, [pairs[at] for at in order if owners[at] == process], table) for process in range(3)
        ]
        index = index_of(Path("step-1"), infos, parts)
        again = read_index(Path("boxes.index"), index_bytes(index), infos, 3)
        for found in (index, again):
            assert list(found.tables) == list(shapes)
            for number, info in enumerate(infos):
                tensor = found.tables[info.name]
                assert list(tensor.boxes()) == sorted(boxes[number])
                for at, box in enumerate(tensor.boxes()):
                    stored = parts[int(tensor.part[at])].box(int(tensor.row[at]), infos)
                    assert (stored.info.name, stored.box) == (info.name, box)
        # In the order of parts and rows: the parts themselves.
        tensor, process, row, corners, ends = again.by_part()
        assert tensor.tolist() == [number for part in parts for number in part.tensor.tolist()]
        assert list(zip(process.tolist(), row.tolist(), strict=True)) == [
            (part.process, row) for part in parts for row in range(len(part))
        ]
        assert corners.tolist() == [at for part in parts for at in part.corners.tolist()]
        assert ends.tolist() == np.cumsum([2 * len(shapes[infos[number].name]) for number in tensor]).tolist()


def test_the_table_of_all_shapes_is_no_larger_than_they_are() -> None:
    """Whatever the numbers of dims: a forged manifest may have tensors of each number from 0 to 64."""
    infos = [TensorInfo(name=f"{n}", shape=(1 + n,) * (n % 65), dtype="int8") for n in range(650)]
    table = InfoTable.of(infos)
    assert sum(shapes.size for shapes in table.shapes.values()) == sum(len(info.shape) for info in infos)
    for number, info in enumerate(infos):
        assert table.shapes[len(info.shape)][table.row[number]].tolist() == list(info.shape)
