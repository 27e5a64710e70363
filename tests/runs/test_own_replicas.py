"""Which process of a user's own program writes which box: each box once, replicas compared, and nobody plans for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, TensorInfo
from shardwright.core.boxes.box import Box
from shardwright.runs.own_program.held import HeldShard, HeldTensor, digest
from shardwright.runs.own_program.members import Members
from shardwright.runs.own_program.replicas import boxes_to_write
from shardwright.runs.own_program.values import decoded, encoded, merged


def held(name: str, *boxes: tuple[int, int], value: float = 0.0) -> HeldTensor:
    """Rows of a vector of 16, all of one value."""
    shards = tuple(HeldShard(Box((a,), (b,)), lambda a=a, b=b: np.full(b - a, value, np.float32)) for a, b in boxes)
    return HeldTensor(info=TensorInfo(name=name, shape=(16,), dtype="float32"), shards=shards)


def in_processes(count: int, do: Callable[[Members], Any]) -> list[Any]:
    """The result of each process, or its error, with one thread for each process."""
    barrier = Barrier(count, timeout=60)
    given: list[Any] = [None] * count
    answers: list[Any] = [None] * count

    def run(index: int) -> None:
        def gather(value: Any) -> list[Any]:
            given[index] = value
            barrier.wait()
            found = list(given)
            barrier.wait()
            return found

        try:
            answers[index] = do(Members(index=index, count=count, noun="rank", gather=gather))
        except CheckpointError as error:
            answers[index] = error

    threads = [Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def together(tensors: Sequence[Sequence[HeldTensor]], names: Sequence[str]) -> list[Any]:
    """What each process writes, or its error."""

    def write(members: Members) -> list[tuple[str, str]]:
        own = {one.info.name: one for one in tensors[members.index]}
        return [(box.name, str(box.box)) for box in boxes_to_write(own, names, members)]

    return in_processes(len(tensors), write)


def test_each_box_is_written_once_and_the_writers_take_turns() -> None:
    names = [f"w{number}" for number in range(6)]
    tensors = [[held(name, (0, 16)) for name in names] for _ in range(3)]
    found = together(tensors, names)
    assert [[name for name, _ in one] for one in found] == [["w0", "w3"], ["w1", "w4"], ["w2", "w5"]]


def test_boxes_that_some_share_are_theirs_alone() -> None:
    tensors = [[held("w", (0, 8))], [held("w", (8, 16))], [held("w", (0, 8), (8, 16))], []]
    found = together(tensors, ["w"])
    assert sorted(place for one in found for place in one) == [("w", "0:8"), ("w", "8:16")]
    assert found[3] == []


def test_replicas_that_differ_are_named_with_their_processes() -> None:
    tensors = [[held("a", (0, 16)), held("b", (0, 8), value=float(rank == 2))] for rank in range(4)]
    found = together(tensors, ["a", "b"])
    assert [one.code for one in found] == ["SW502"] * 4
    assert str(found[0]).split("\n")[1] == "  'b', box [0:8]: ranks 0, 1 and 3 and rank 2 hold other values"


def test_processes_that_hold_none_of_the_replicas_that_differ_refuse_too() -> None:
    found = together([[], [held("w", (0, 16))], [held("w", (0, 16), value=1.0)]], ["w"])
    assert len({str(one) for one in found}) == 1
    assert str(found[0]).split("\n")[1] == "  'w', box [0:16]: rank 1 and rank 2 hold other values"


def test_of_equal_values_one_is_sent() -> None:
    values = [["a"], ["b"], ["a"], ["b"]]
    found = in_processes(4, lambda members: members.distinct(values[members.index]))
    assert found == [[(["a"], 0), (["b"], 1)]] * 4
    assert in_processes(2, lambda members: members.distinct("same")) == [[("same", 0)]] * 2


def test_elements_that_one_process_cannot_read_end_all() -> None:
    def unreadable() -> np.ndarray:
        raise RuntimeError("CUDA error")

    broken = HeldTensor(info=held("w").info, shards=(HeldShard(Box((0,), (16,)), unreadable),))
    found = together([[held("w", (0, 16))], [broken]], ["w"])
    assert str(found[1]) == "tensor 'w', box [0:16]: its elements cannot be read: RuntimeError: CUDA error"
    assert str(found[0]) == f"the digests of replicas: rank 1 of 2 could not do it. Its error: {found[1]}"


def test_one_of_4096_processes_knows_what_it_writes_in_seconds() -> None:
    """Each concludes it from what the others say; where one plans for all, 2,816 processes do not end."""
    count, rows, names = 4096, 16 << 12, [f"layers.{number}.weight" for number in range(256)]
    info = TensorInfo(name="", shape=(rows,), dtype="uint8")

    def held_by(process: int) -> dict[str, HeldTensor]:
        """A sixteenth of its rows on the ranks of 256 replicas."""
        box = Box((16 * (process % 16),), (16 * (process % 16) + 16,))
        shard = HeldShard(box, lambda: np.zeros(16, np.uint8))
        return {name: HeldTensor(info=replace(info, name=name), shards=(shard,)) for name in names}

    asked: list[Any] = []

    def first(value: Any) -> list[Any]:
        asked.append(value)
        return [value]

    said: dict[int, list[Any]] = {}
    for process in range(16):
        asked.clear()
        boxes_to_write(held_by(process), names, Members(index=0, count=1, noun="rank", gather=first))
        said[process] = list(asked)
    digests = [[None, "".join(_pairs(said[process][0][1]))] for process in range(16)]
    answers = iter(
        [
            [said[process % 16][0] for process in range(count)],
            [digests[process % 16] for process in range(count)],
            [[] for _ in range(count)],
        ]
    )
    own, start = held_by(19), time.process_time()
    found = boxes_to_write(own, names, Members(index=19, count=count, noun="rank", gather=lambda _: next(answers)))
    seconds = time.process_time() - start
    # Of 256 replicas each writes every 256th tensor.
    assert [box.name for box in found] == [names[19 // 16]]
    assert seconds < 10


def _pairs(codes: str) -> list[str]:
    """The digests that a process sends of these boxes, whose elements are all the same."""
    value = np.uint64(int(digest(np.zeros(16, np.uint8))[:16], 16)).tobytes().hex()
    return [codes[place : place + 16] + value for place in range(0, len(codes), 16)]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([{"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}], {"a": 1, "b": {"c": 2, "d": 3}}),
        ([{"a": (1, 2)}, {"a": (1, 2)}], {"a": (1, 2)}),
    ],
)
def test_values_of_processes_are_joined_by_their_keys(values: list[Any], found: Any) -> None:
    assert decoded(merged(*_of(values))) == found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [{"a": {"b": 1}}, {"a": {"b": 2}}],
            "a['b'] is 1 on process 0 and 2 on process 1: a checkpoint has one value for all.",
        ),
        (
            [{"a": (1, 2)}, {"a": {"b": 2}}],
            "a is {'$tuple': [1, 2]} on process 0 and {'b': 2} on process 1: a checkpoint has one",
        ),
        ([{}, {"a": 1}, {"a": 2}], "a is 1 on process 1 and 2 on process 2: a checkpoint has one value for all."),
    ],
)
def test_values_that_contradict_each_other(values: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        merged(*_of(values))
    assert str(caught.value).startswith(message)


def _of(values: list[Any]) -> tuple[Any, Members]:
    json = [encoded(one, "values") for one in values]
    return json[0], Members(index=0, count=len(json), noun="process", gather=lambda _: json)


@pytest.mark.parametrize("value", [{"$float": "x"}, {"$scalar": [1]}, {"$what": 1}, {"$mapping": [1]}])
def test_values_that_nobody_saved(value: Any) -> None:
    with pytest.raises(CheckpointError, match="is not one that was saved"):
        decoded(value)
