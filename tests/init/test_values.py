"""Initial values: any box alone has the bits of the full tensor, and the values have the specified distribution."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import Initializer, Weight
from shardwright.init import box_values, tensor_values
from shardwright.init import values as values_module
from shardwright.init.normal import truncated_normal
from shardwright.init.values import CHUNK, MOST_THREADS

NORMAL = Initializer(kind="normal", stddev=1.0)


def whole(name: str = "w", shape: tuple[int, ...] = (1000, 1000), seed: int = 0) -> np.ndarray:
    return tensor_values(name, shape, NORMAL, seed, Box.whole(shape))


def stacked_weight(initializer: Initializer = NORMAL) -> Weight:
    axes = ("embed", "heads", "head_dim")
    return Weight(
        name="layers/q",
        component="attention",
        logical_axes=axes,
        shape=(7, 3, 5),
        initializer=initializer,
        contracted=(),
        num=4,
        stack="layers",
    )


@st.composite
def tensors_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@settings(max_examples=300)
@given(tensors_and_boxes(), st.sampled_from([1, 2, 5, 64, CHUNK]))
def test_any_box_has_the_bits_of_the_full_tensor(case: tuple[tuple[int, ...], Box], chunk: int) -> None:
    shape, box = case
    expected = whole(shape=shape)[box.slices]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values_module, "CHUNK", chunk)
        found = tensor_values("w", shape, NORMAL, 0, box)
    assert found.dtype == np.float32
    assert found.shape == box.shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (3, 130, 251)),
        Box((1, 17, 0), (3, 130, 251)),
        Box((0, 3, 7), (3, 129, 250)),
        Box((2, 0, 250), (3, 130, 251)),
    ],
    ids=str,
)
def test_boxes_larger_than_a_chunk_have_the_bits_of_the_full_tensor(box: Box) -> None:
    shape = (3, 130, 251)
    assert math.prod(shape) > 2 * CHUNK
    np.testing.assert_array_equal(tensor_values("w", shape, NORMAL, 0, box), whole(shape=shape)[box.slices])


def test_an_element_depends_on_its_row_major_index_alone() -> None:
    np.testing.assert_array_equal(whole(shape=(6, 4)).reshape(-1), whole(shape=(24,)))


def test_a_layer_alone_has_the_bits_of_the_stack() -> None:
    weight = stacked_weight()
    stack = box_values(weight, 3, Box.whole((4, 7, 3, 5)))
    for layer in range(4):
        np.testing.assert_array_equal(box_values(weight, 3, Box.whole(weight.shape), layer), stack[layer])
        inner = Box((2, 0, 1), (6, 2, 4))
        np.testing.assert_array_equal(box_values(weight, 3, inner, layer), stack[layer][inner.slices])
    some = Box((1, 2, 0, 1), (3, 6, 2, 4))
    np.testing.assert_array_equal(box_values(weight, 3, some), stack[some.slices])


def test_boxes_beyond_two_to_the_32_elements_are_made_alone() -> None:
    shape = (1 << 20, 1 << 20)
    far = tensor_values("w", shape, NORMAL, 0, Box(((1 << 20) - 2, 5), (1 << 20, 9)))
    near = tensor_values("w", shape, NORMAL, 0, Box((0, 5), (2, 9)))
    assert len({*far.reshape(-1).tolist(), *near.reshape(-1).tolist()}) == 16


def test_the_bits_never_change() -> None:
    """Golden values: a change here changes every run that starts from a seed."""
    assert [value.hex() for value in whole("embedding", (5,), seed=0).tolist()] == GOLDEN_0
    assert [value.hex() for value in whole("embedding", (5,), seed=2**40).tolist()] == GOLDEN_1
    weight = stacked_weight(Initializer(kind="normal", stddev=0.02))
    far = box_values(weight, 1, Box((6, 2, 3), (7, 3, 5)), 3)
    assert [value.hex() for value in far.reshape(-1).tolist()] == GOLDEN_2


GOLDEN_0 = [
    "0x1.117f7a0000000p-1",
    "-0x1.bb6e5a0000000p-1",
    "0x1.e46f5c0000000p-1",
    "0x1.e00d500000000p-1",
    "0x1.803e7e0000000p-8",
]
GOLDEN_1 = [
    "0x1.4a58780000000p-2",
    "0x1.64e6440000000p+0",
    "-0x1.02985c0000000p+1",
    "0x1.321d4c0000000p+0",
    "-0x1.3b0c040000000p-2",
]
GOLDEN_2 = ["-0x1.7feb080000000p-5", "0x1.4b36c80000000p-8"]


def test_names_and_seeds_are_independent() -> None:
    tensors = [whole(name, (200_000,), seed) for name in ("a", "b", "layers/a") for seed in (0, 1, -1)]
    correlation = np.corrcoef(np.stack(tensors).astype(np.float64))
    # Five standard deviations of the correlation of independent values.
    assert np.abs(correlation - np.eye(9)).max() < 5 / math.sqrt(200_000)


def test_neighbours_are_independent() -> None:
    values = whole(shape=(1 << 20,)).astype(np.float64)
    for distance in (1, 2, 3, 64, 1000, 4096, 1 << 16):
        product = float(np.mean(values[:-distance] * values[distance:]))
        assert abs(product) < 5 / math.sqrt(values.size - distance), distance


def test_moments_are_those_of_the_normal_truncated_at_three() -> None:
    values = whole(shape=(2_000_000,)).astype(np.float64)
    stddev = math.sqrt(_moment(2))
    kurtosis = _moment(4) / _moment(2) ** 2
    assert abs(values.mean()) < 5 / math.sqrt(values.size)
    assert abs(values.var() - 1) < 5 * math.sqrt((kurtosis - 1) / values.size)
    assert np.mean(values**3) == pytest.approx(0, abs=0.02)
    assert np.mean(values**4) == pytest.approx(kurtosis, abs=0.02)
    assert np.abs(values).max() == pytest.approx(3 / stddev, abs=2e-4)
    assert np.abs(values).max() <= np.float32(3 / stddev)


def _moment(power: int) -> float:
    """Of the standard normal truncated at 3, by the midpoint rule."""
    x = (np.arange(1_000_000) + 0.5) * 6e-6 - 3
    density = np.exp(-x * x / 2)
    return float((x**power * density).sum() / density.sum())


def test_distribution_passes_kolmogorov_and_smirnov() -> None:
    values = np.sort(whole(shape=(100_000,)).astype(np.float64)) * math.sqrt(_moment(2))
    mass = math.erf(3 / math.sqrt(2))
    expected = np.array([0.5 + 0.5 * math.erf(value / math.sqrt(2)) / mass for value in values])
    steps = np.arange(values.size + 1) / values.size
    distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    # 1 in 1,000 samples of the true distribution exceeds this value.
    assert distance < 1.95 / math.sqrt(values.size)


def test_stddev_is_that_of_the_initializer() -> None:
    made = tensor_values("w", (1000, 1000), Initializer(kind="normal", stddev=0.006), 0, Box.whole((1000, 1000)))
    assert made.astype(np.float64).std() == pytest.approx(0.006, rel=0.003)


def test_ones_zeros_and_no_deviation() -> None:
    box = Box((1, 0), (3, 2))
    for initializer, value in (
        (Initializer(kind="ones"), 1),
        (Initializer(kind="zeros"), 0),
        (Initializer(kind="normal", stddev=0.0), 0),
    ):
        made = tensor_values("norm", (4, 4), initializer, 0, box)
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made, np.full((2, 2), value))


def test_scalars_and_empty_boxes() -> None:
    assert tensor_values("s", (), NORMAL, 0, Box((), ())).shape == ()
    assert tensor_values("w", (4, 6), NORMAL, 0, Box((2, 3), (2, 6))).shape == (0, 3)


def test_memory_is_that_of_the_result() -> None:
    shape = (2048, 1024)
    tracemalloc.start()
    tensor_values("w", shape, NORMAL, 0, Box.whole(shape))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    assert peak_bytes < 4 * math.prod(shape) + threads**2 * 80 * CHUNK  # ten float64 arrays of a chunk of each


def test_speed_is_millions_of_elements_a_second() -> None:
    box = Box((0, 1), (1000, 1001))
    times_s = []
    for _ in range(3):
        start_s = time.process_time()
        tensor_values("w", (1000, 1024), NORMAL, 0, box)
        times_s.append(time.process_time() - start_s)
    assert box.size / min(times_s) > 3e6


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_number_of_threads_moves_no_bit(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    shape, box = (3, 1401, 1601), Box((1, 0, 3), (3, 1400, 1600))
    expected = tensor_values("w", shape, NORMAL, 0, Box.whole(shape))[box.slices]
    monkeypatch.setattr(values_module, "MOST_THREADS", count)
    monkeypatch.setattr(values_module, "_cores", lambda: 64)
    assert (tensor_values("w", shape, NORMAL, 0, box) == expected).all()


def test_an_error_in_a_thread_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(bits: np.ndarray) -> np.ndarray:
        calls.append(bits.size)
        if len(calls) == 3:
            raise MemoryError("no memory for a chunk")
        return truncated_normal(bits)

    monkeypatch.setattr(values_module, "truncated_normal", full)
    monkeypatch.setattr(values_module, "_cores", lambda: 2)
    with pytest.raises(MemoryError, match="a chunk"):
        whole(shape=(200, CHUNK))
    assert len(calls) < 20


def test_threads_compute_the_same_bits() -> None:
    made: dict[int, np.ndarray] = {}
    workers = [threading.Thread(target=lambda n=n: made.update({n: whole(shape=(50_000,))})) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for n in range(4):
        np.testing.assert_array_equal(made[n], whole(shape=(50_000,)))


PRINT_DIGEST = """
import hashlib
import numpy as np
from shardwright.init.counter import key_of, scramble
from shardwright.init.normal import truncated_normal
values = truncated_normal(scramble(np.arange(100_001, dtype=np.uint64), key_of(5, "w")))
print(hashlib.sha256(values.tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_the_vector_instructions() -> None:
    """With every vector extension of NumPy disabled, NumPy's own logarithm gives other bits; ours must not."""
    config = np.show_config(mode="dicts")
    assert config is not None
    digests = set()
    for features in ("", " ".join(config["SIMD Extensions"]["found"])):
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": features}
        command = [sys.executable, "-c", PRINT_DIGEST]
        digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1
