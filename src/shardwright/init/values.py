"""Initial values of any box of any tensor, computed without the rest of the tensor.

An element's value depends on the seed, the tensor's name and the element's row-major index in the global tensor
(last dim fastest). Layers that share a row of the model table count as a leading dim.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from math import isqrt, prod
from threading import Lock

import numpy as np

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import Initializer, Weight
from shardwright.init.counter import key_of, scramble
from shardwright.init.normal import STDDEV, truncated_normal

CHUNK = 1 << 15
"""Elements computed at a time, for each thread of the process: few enough for a processor's cache, and the only memory needed in addition
to the result, 170 MB at most. With more threads each computes more at a time, so that they rarely wait for Python's lock."""

MOST_THREADS = 8
"""Of a process: a host's ranks share its processors."""


def box_values(weight: Weight, seed: int, box: Box, layer: int | None = None) -> np.ndarray:
    """Initial values of one box of a weight, float32, of the shape of the box.

    With ``layer``, counted from 0 among the ``num`` layers that share the weight, ``box`` is a box of that layer.
    Without it, ``box`` is a box of the entire weight, with its layers as a leading dim if an engine
    may stack them. Dims are the model table's, not those of ``as_torch_stores``. The bits are the same either way:

    >>> weight = Weight(name="up", component="mlp", logical_axes=("embed", "mlp"), shape=(4, 6), contracted=(),
    ...                 initializer=Initializer(kind="normal", stddev=0.02), num=3, stack="layers")
    >>> stacked = box_values(weight, 7, Box((0, 0, 0), (3, 4, 6)))
    >>> alone = box_values(weight, 7, Box((1, 2), (3, 6)), layer=2)
    >>> bool((stacked[2, 1:3, 2:6] == alone).all())
    True
    """
    shape = weight.shape
    if layer is not None:
        assert 0 <= layer < weight.num, (weight.name, layer, weight.num)
        stacked = Box((layer, *box.start), (layer + 1, *box.stop))
        values = tensor_values(weight.name, (weight.num, *shape), weight.initializer, seed, stacked)
        return values.reshape(box.shape)
    if weight.stack is not None:
        shape = (weight.num, *shape)
    return tensor_values(weight.name, shape, weight.initializer, seed, box)


def tensor_values(name: str, shape: Sequence[int], initializer: Initializer, seed: int, box: Box) -> np.ndarray:
    """Initial values of one box of the tensor ``name`` of ``shape``, float32, of the shape of the box.

    ``normal``: the standard normal truncated at 3, scaled so that the standard deviation of the values is
    ``initializer.stddev``; the largest values are therefore 3.04 times that.
    """
    assert all(stop <= size for stop, size in zip(box.stop, shape, strict=True)), (name, shape, box)
    match initializer.kind:
        case "zeros":
            return np.zeros(box.shape, np.float32)
        case "ones":
            return np.ones(box.shape, np.float32)
        case "normal":
            return _normal_values(key_of(seed, name), tuple(shape), initializer.stddev / STDDEV, box)


def _normal_values(key: tuple[np.uint64, np.uint64], shape: tuple[int, ...], scale: float, box: Box) -> np.ndarray:
    values = np.empty(box.size, np.float32)
    count = max(1, min(MOST_THREADS, _cores(), isqrt(box.size // CHUNK)))
    chunks, turn = _chunks(shape, box, CHUNK * count), Lock()

    def fill() -> None:
        while True:
            with turn:
                start, index = next(chunks, (0, None))
            if index is None:
                return
            chunk = truncated_normal(scramble(index, key))
            chunk *= scale
            values[start : start + chunk.size] = chunk

    if count > 1:
        with ThreadPoolExecutor(count, "shardwright init") as threads:
            running = [threads.submit(fill) for _ in range(count)]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                # Those that still run end with their chunk.
                with turn:
                    chunks.close()
        for one in running:
            one.result()
    else:
        fill()
    return values.reshape(box.shape)


def _cores() -> int:
    """Those that this process may use, where the system says it: a scheduler may give a task one of many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(shape: tuple[int, ...], box: Box, most: int) -> Generator[tuple[int, np.ndarray], None, None]:
    """Where each chunk of indices starts in the box, and the chunk."""
    start = 0
    for index in _indices(shape, box, most):
        yield start, index
        start += index.size
    assert start == box.size


def _indices(shape: tuple[int, ...], box: Box, most: int) -> Iterator[np.ndarray]:
    """The index in the global tensor of each element of the box, in the order of the box, in chunks of at most ``most``, uint64.

    The trailing dims that the box covers fully, and the last dim before them, form contiguous runs.

    >>> [index.tolist() for index in _indices((3, 4), Box((1, 1), (3, 3)), 8)]
    [[5, 6, 9, 10]]
    """
    if box.size == 0:
        return
    num_outer = max(len(shape) - 1, 0)
    while num_outer and box.start[num_outer] == 0 and box.stop[num_outer] == shape[num_outer]:
        num_outer -= 1
    stride = prod(shape[num_outer + 1 :])
    run = prod(box.shape[num_outer:])
    first = box.start[num_outer] * stride if shape else 0
    num_runs = prod(box.shape[:num_outer])
    runs_per_chunk, run_per_chunk = max(1, most // run), min(run, most)
    for run_start in range(0, num_runs, runs_per_chunk):
        bases = _run_bases(shape, box, num_outer, run_start, min(run_start + runs_per_chunk, num_runs))
        bases += np.uint64(first)
        for start in range(0, run, run_per_chunk):
            within = np.arange(start, min(start + run_per_chunk, run), dtype=np.uint64)
            yield (bases[:, None] + within).reshape(-1)


def _run_bases(shape: tuple[int, ...], box: Box, num_outer: int, start: int, stop: int) -> np.ndarray:
    """Index in the global tensor at which the outer dims of runs ``start`` to ``stop`` of the box begin, uint64."""
    rest = np.arange(start, stop, dtype=np.uint64)
    bases = np.zeros_like(rest)
    for dim in reversed(range(num_outer)):
        rest, index = np.divmod(rest, np.uint64(box.shape[dim]))
        bases += (index + np.uint64(box.start[dim])) * np.uint64(prod(shape[dim + 1 :]))
    return bases
