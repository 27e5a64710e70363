"""States to save: named arrays, split into boxes by random partitions that are independent of any mesh."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from shardwright.checkpoint import Keep, OwnedBox, RunPoint, TensorInfo, save_checkpoint
from shardwright.core.boxes.box import Box

DTYPES = (
    np.dtype(np.float32),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float16),
    np.dtype(np.int32),
    np.dtype(np.int64),
    np.dtype(np.uint8),
    np.dtype(np.bool_),
    np.dtype(ml_dtypes.float8_e4m3fn),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Arrays by name and, for each, the boxes in which it is saved."""

    arrays: Mapping[str, np.ndarray]
    boxes: Mapping[str, Sequence[Box]]

    @property
    def infos(self) -> list[TensorInfo]:
        return [
            TensorInfo(name=name, shape=array.shape, dtype=array.dtype.name, spec=f"spec of {name}")
            for name, array in self.arrays.items()
        ]

    @property
    def owned(self) -> list[OwnedBox]:
        return [
            OwnedBox(name=name, box=box, array=self.arrays[name][box.slices])
            for name, boxes in self.boxes.items()
            for box in boxes
        ]


def point(step: int = 10, **changes: object) -> RunPoint:
    values: dict[str, object] = {
        "step": step,
        "seed": 3,
        "data_position": 8 * step,
        "model": "llama3-test",
        "layout_name": "fsdp",
        "layout_text": "name: fsdp\nmesh: {fsdp: 8}\n",
        "mesh": {"data": 1, "fsdp": 8},
        "metadata": {"lr": 3e-4, "schedule": ["cosine", 100]},
    }
    return RunPoint(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def random_partition(rng: np.random.Generator, box: Box, splits: int) -> list[Box]:
    """Boxes that make up ``box``, by splitting one of them in two ``splits`` times; seldom a grid."""
    boxes = [box]
    for _ in range(splits):
        old = boxes.pop(int(rng.integers(len(boxes))))
        dims = [dim for dim, size in enumerate(old.shape) if size > 1]
        if not dims:
            boxes.append(old)
            continue
        dim = int(rng.choice(dims))
        at = int(rng.integers(old.start[dim] + 1, old.stop[dim]))
        boxes.append(Box(old.start, (*old.stop[:dim], at, *old.stop[dim + 1 :])))
        boxes.append(Box((*old.start[:dim], at, *old.start[dim + 1 :]), old.stop))
    return boxes


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Random bits, including NaNs; for bool, one of its two values."""
    if dtype == np.bool_:
        return rng.integers(0, 2, tuple(shape)).astype(np.bool_)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(tuple(shape)).copy()


def random_state(seed: int, tensors: int = 6) -> State:
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {"step": np.array(seed, np.int32)}
    for number in range(tensors):
        shape = rng.integers(1, 9, int(rng.integers(0, 4))).tolist()
        arrays[f"moments.first/w{number}"] = random_array(rng, shape, DTYPES[int(rng.integers(len(DTYPES)))])
    boxes = {
        name: random_partition(rng, Box.whole(array.shape), int(rng.integers(0, 7))) for name, array in arrays.items()
    }
    return State(arrays=arrays, boxes=boxes)


def small_state() -> State:
    """Two weights and a counter, always the same: for tests that damage a checkpoint and read the error."""
    embed = np.arange(32, dtype=np.float32).reshape(4, 8)
    scale = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return State(
        arrays={"embed": embed, "scale": scale, "count": np.array(7, np.int32)},
        boxes={
            # Blocks of columns: blocks of rows would be stored as one box.
            "embed": [Box((0, 0), (4, 4)), Box((0, 4), (4, 8))],
            "scale": [Box((0,), (6,))],
            "count": [Box((), ())],
        },
    )


def save(out: Path, state: State, step: int = 10, keep: Keep = None, **changes: object) -> Path:
    return save_checkpoint(out, point(step, **changes), state.infos, state.owned, keep=keep)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype, shape and bits, so that a NaN equals itself."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


NOBODY = 65_534
"""A user without rights, where the tests run as one who may write everywhere."""


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder in which this process may not write. Everybody must be able to reach it."""
    mode, is_root = folder.stat().st_mode, os.geteuid() == 0
    folder.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(mode)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The operating system's limit of a file's size, which makes a write fail as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
