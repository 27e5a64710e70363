"""The order of rows: a function of seed and global index only, whichever process reads and wherever a run resumes."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest

from shardwright.data import ROW_FIELDS, Batches, Row, Rows
from tests.data.corpora import corpus_of

LENGTH = 8
NUM_ROWS = 37
ROWS = Rows(corpus=corpus_of(*(chr(0x100 + n) * (1 + n % 23) for n in range(120))), length=LENGTH)
FEW = Rows(corpus=corpus_of("".join(chr(ord("0") + n) * LENGTH for n in range(NUM_ROWS))), length=LENGTH)
"""Row n of these consists of character number n only, so that a row identifies itself."""


def numbers(arrays: Row) -> list[int]:
    return [int(first) - ord("0") for first in arrays["tokens"][:, 0]]


def order(count: int, seed: int = 0, start_row: int = 0) -> list[int]:
    return numbers(Batches(rows=FEW, batch=count, seed=seed, start_row=start_row).read(0).arrays)


def assert_rows_equal(found: Row, expected: Row) -> None:
    assert list(found) == list(expected) == list(ROW_FIELDS)
    for name, values in expected.items():
        assert found[name].dtype == ROW_FIELDS[name]
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_few_is_numbered() -> None:
    assert len(FEW) == NUM_ROWS


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 5])
def test_row_k_is_the_same_for_every_batch_size(batch: int) -> None:
    whole = Batches(rows=ROWS, batch=40, seed=3).read(0).arrays
    steps = [Batches(rows=ROWS, batch=batch, seed=3).read(step) for step in range(40 // batch)]
    assert_rows_equal({name: np.concatenate([step.arrays[name] for step in steps]) for name in ROW_FIELDS}, whole)
    assert [step.first_row for step in steps] == list(range(0, 40, batch))
    assert [step.next_row for step in steps] == list(range(batch, 41, batch))


CHUNKS = (0, 3, 1, 2)
"""Load-balanced (head and tail) over two devices, of 8 tokens: 0 1 6 7 | 2 3 4 5."""


def test_chunks_of_a_row_have_the_same_order_in_every_field() -> None:
    """Positions too: a query with another token's position would attend to other keys."""
    text = Batches(rows=ROWS, batch=6, seed=3).read(2).arrays
    arranged = Batches(rows=ROWS, batch=6, seed=3, chunks=CHUNKS).read(2).arrays
    assert_rows_equal(arranged, {name: array[:, [0, 1, 6, 7, 2, 3, 4, 5]] for name, array in text.items()})


@pytest.mark.parametrize("chunks", [(0,), (0, 1, 2, 3), (0, 7, 1, 6, 2, 5, 3, 4)])
def test_a_run_resumes_with_another_order_of_chunks(chunks: tuple[int, ...]) -> None:
    """The saved position is the number of a row: the same tokens follow, in whatever order of chunks."""
    before = Batches(rows=ROWS, batch=4, seed=0, chunks=CHUNKS)
    after = Batches(rows=ROWS, batch=3, seed=0, start_row=before.read(4).next_row, chunks=chunks)
    straight = Batches(rows=ROWS, batch=1, seed=0)
    for step in range(3):
        arrays = after.read(step).arrays
        for place in range(3):
            wanted = straight.read(20 + 3 * step + place).arrays
            back = np.argsort(np.arange(LENGTH).reshape(len(chunks), -1)[list(chunks)].reshape(-1))
            assert_rows_equal({name: array[place : place + 1, back] for name, array in arrays.items()}, wanted)


@pytest.mark.parametrize("batch_after", [4, 8, 3])
def test_a_run_resumes_where_it_stopped(batch_after: int) -> None:
    straight = order(60)
    before = Batches(rows=FEW, batch=4, seed=0)
    stopped = [before.read(step) for step in range(5)]
    after = Batches(rows=FEW, batch=batch_after, seed=0, start_row=stopped[-1].next_row)
    found = [n for step in stopped for n in numbers(step.arrays)]
    found += [n for step in range(3) for n in numbers(after.read(step).arrays)]
    assert found == straight[: len(found)]


def test_each_epoch_has_each_row_once_in_its_own_order() -> None:
    stream = order(4 * NUM_ROWS)
    epochs = [stream[start : start + NUM_ROWS] for start in range(0, len(stream), NUM_ROWS)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(NUM_ROWS)]}) == 5


def test_no_seed_is_another_one_epoch_later() -> None:
    epochs = {tuple(order(NUM_ROWS, seed, epoch * NUM_ROWS)) for seed in (-1, 0, 1, 2, 2**40) for epoch in range(3)}
    assert len(epochs) == 15


def test_the_order_never_changes() -> None:
    """Golden: another order would change the data of every run resumed from an existing checkpoint."""
    assert order(10) == [3, 7, 10, 12, 9, 24, 23, 27, 13, 21]
    assert order(5, seed=1, start_row=10**12) == [0, 13, 35, 2, 3]


def test_rows_that_are_not_requested_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    get = Rows.__getitem__

    def counting(rows: Rows, index: int) -> Row:
        read.append(index)
        return get(rows, index)

    monkeypatch.setattr(Rows, "__getitem__", counting)
    batches = Batches(rows=FEW, batch=8, seed=0, start_row=16)
    some = batches.read(1, offsets=[6, 1])
    assert read == numbers(some.arrays)
    monkeypatch.undo()
    every = batches.read(1)
    assert_rows_equal(some.arrays, {name: values[[6, 1]] for name, values in every.arrays.items()})
    assert (some.first_row, some.next_row) == (every.first_row, every.next_row) == (24, 32)
    nothing = batches.read(1, offsets=[])
    assert {name: values.shape for name, values in nothing.arrays.items()} == dict.fromkeys(ROW_FIELDS, (0, LENGTH))


@pytest.mark.parametrize("offsets", [None, range(2, 4)])
def test_reading_ahead_changes_nothing(offsets: range | None) -> None:
    batches = Batches(rows=ROWS, batch=4, seed=9, start_row=6)
    with batches.prefetched(offsets) as ahead:
        found = list(islice(ahead, 30))
    for step, batch in enumerate(found):
        expected = batches.read(step, offsets)
        assert (batch.first_row, batch.next_row) == (expected.first_row, expected.next_row)
        assert_rows_equal(batch.arrays, expected.arrays)


def test_the_next_step_is_read_while_this_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """``next`` is not called between the first step and the arrival of the step two ahead."""
    arrived = threading.Event()
    get = Rows.__getitem__

    def telling(rows: Rows, index: int) -> Row:
        if index == third:
            arrived.set()
        assert threading.current_thread() is not threading.main_thread()
        return get(rows, index)

    third = order(3)[2]
    monkeypatch.setattr(Rows, "__getitem__", telling)
    with Batches(rows=FEW, batch=1, seed=0).prefetched(depth=2) as ahead:
        next(ahead)
        assert arrived.wait(timeout=60)


def test_the_thread_ends_with_the_block() -> None:
    before = set(threading.enumerate())
    with Batches(rows=FEW, batch=4, seed=0).prefetched() as ahead:
        next(ahead)
        (reader,) = set(threading.enumerate()) - before
    reader.join(timeout=60)
    assert not reader.is_alive()


def test_an_exception_in_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Row:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Rows, "__getitem__", failing)
    with Batches(rows=FEW, batch=4, seed=0).prefetched() as ahead, pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


PROGRAM = """
import sys

class WithoutJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutJax())
import numpy as np
from shardwright.data import Batches, Corpus, Rows
assert not {"jax", "torch", "grain", "tokenizers"} & set(sys.modules), "loaded before it was needed"
tokens = np.arange(4000, dtype=np.uint16)
rows = Rows(corpus=Corpus(source="", tokenizer="", tokens=tokens, ends=np.array([4000])), length=4)
with Batches(rows=rows, batch=4, seed=0).prefetched() as ahead:
    print(*next(ahead).arrays["tokens"][:, 0])
    ENDING
"""


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("pass", 0, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_a_program_ends_at_once_and_without_output(ending: str, code: int, last: str) -> None:
    """However it ends, the thread does not delay it; and grain logs nothing where JAX is not installed.

    Where it is, a warning of grain's would be an error in the other tests.
    """
    command = [sys.executable, "-W", "error", "-c", PROGRAM.replace("ENDING", ending)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.strip().splitlines()[-1:] == ([last] if last else []), ran.stderr
    assert len(ran.stdout.split()) == 4


def test_jax_is_not_imported_to_read_rows_and_can_be_afterwards() -> None:
    """A rank of PyTorch would take a second more to start."""
    program = PROGRAM.replace("sys.meta_path.insert(0, WithoutJax())", "").replace(
        "ENDING", "assert 'jax' not in sys.modules; import jax; jax.devices"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_threads_that_begin_at_once_all_find_grain() -> None:
    program = """
import threading
from shardwright.data.batches import _grain
at_once = threading.Barrier(4)
def work():
    at_once.wait()
    _grain().MapDataset.range(3)
threads = [threading.Thread(target=work) for _ in range(4)]
for one in threads: one.start()
for one in threads: one.join()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
