"""What all devices must hold alike is refused where it differs, in all processes, with both values; nothing is saved then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest

from shardwright import load_recipe, make_plan
from shardwright.checkpoint import CheckpointError, OwnedBox, committed
from shardwright.core.boxes.box import Box
from shardwright.runs import HeldReplica, RunError, run
from shardwright.runs.processes.group import ExchangedValue
from shardwright.runs.processes.replicas import require_equal
from shardwright.training.options import RunOptions, Silent
from tests.runs.counting import NOBODY, ROWS, Counting, counting, made, options, plan_of

Held = Mapping[str, Sequence[float]]
ADVICE = (
    "A device has computed or received other amaxes in a step since the last checkpoint. Continue from that one with --resume; if it "
    "happens again, leave this machine out."
)


class Members:
    """Processes as threads, which exchange values as the hub of a run does."""

    def __init__(self, index: int, count: int, barrier: Barrier, given: list[Any]) -> None:
        self.index, self.count, self._barrier, self._given = index, count, barrier, given

    def exchange(self, name: str, value: Any, timeout_s: float = 0) -> Sequence[ExchangedValue]:
        del name, timeout_s
        self._given[self.index] = json.dumps(value)
        self._barrier.wait()
        first = {text: process for process, text in reversed(list(enumerate(self._given)))}
        self._barrier.wait()
        return [
            ExchangedValue(json.loads(text), process) for text, process in sorted(first.items(), key=lambda one: one[1])
        ]


def boxes_of(held: Held) -> Iterator[OwnedBox]:
    """``held``: values by the name of a tensor and the first row of a box of it, as ``history 2``; several devices of it by a third word."""
    for key, values in held.items():
        name, row, *_ = key.split()
        start = int(row)
        array = np.array([values], np.float32)
        yield OwnedBox(name=name, box=Box((start, 0), (start + 1, len(values))), array=lambda array=array: array)


def outcomes(processes: Sequence[Held]) -> list[str]:
    """What each process reads; '' where it may save."""
    barrier, given = Barrier(len(processes), timeout=60), [None] * len(processes)
    found = [""] * len(processes)

    def compare(index: int) -> None:
        try:
            require_equal(boxes_of(processes[index]), Members(index, len(processes), barrier, given), 7)
        except CheckpointError as error:
            found[index] = f"{error.code} {error.message}"

    threads = [Thread(target=compare, args=(index,)) for index in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_equal_replicas_and_boxes_of_others_are_no_fault() -> None:
    assert outcomes([{"a 0": [1.0, 2.0], "b 0": [3.0]}, {"a 0": [1.0, 2.0], "b 1": [4.0]}]) == ["", ""]


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        (
            [{"a 0": [1.0, 2.0]}, {"a 0": [1.0, 2.0]}, {"a 0": [1.0, 2.5]}],
            "'a' [0:1,0:2] must be the same on all devices that hold it, and element 1 is 2.0 in process 0, 2.5 in process 2.",
        ),
        (
            [{"a 0": [1.0], "b 1": [0.0], "c 0": [4.0]}, {"b 1": [0.5], "c 0": [5.0]}, {"a 0": [1.0]}],
            "'b' [1:2,0:1] must be the same on all devices that hold it, and element 0 is 0.0 in process 0, 0.5 in process 1. 1 more tensor differs too.",
        ),
        (
            [{"a 0": [1.0]}, {"a 0 first": [1.0], "a 0 second": [1.0000001]}],
            "'a' [0:1,0:1] must be the same on all devices that hold it, and element 0 is 1.0 in process 0, 1.0000001192092896 in process 1.",
        ),
        (
            [{"a 0 first": [1.0], "a 0 second": [-1.0]}],
            "'a' [0:1,0:1] must be the same on all devices that hold it, and element 0 is 1.0 and -1.0 on devices of process 0.",
        ),
        (
            [{"a 0": [0.0]}, {"a 0": [-0.0]}],
            "'a' [0:1,0:1] must be the same on all devices that hold it, and element 0 is 0.0 in process 0, -0.0 in process 1.",
        ),
    ],
)
def test_replicas_that_differ_are_named_in_all_processes(processes: Sequence[Held], text: str) -> None:
    assert outcomes(processes) == [f"SW502 the checkpoint of step 7: {text} Nothing was saved.\n{ADVICE}"] * len(
        processes
    )


class Diverging(Counting):
    """A process with two devices, whose histories differ from step 4 on."""

    def replicas(self) -> Iterator[OwnedBox]:
        yield from boxes_of({"history 0 first": [1.0], "history 0 second": [2.0 if self._step >= 4 else 1.0]})


def test_a_run_ends_before_it_saves_one_of_two_histories(tmp_path: Any) -> None:
    plan = make_plan(replace(plan_of().request, precision=load_recipe("fp8-delayed")))
    run_options: RunOptions = replace(options(tmp_path), checkpoint_every=2)

    def go(engine: Counting, **changes: Any) -> Any:
        changed = replace(run_options, **changes)
        return run(changed, plan, Silent(), connection=NOBODY, make_engine=made(engine))

    with pytest.raises(
        CheckpointError, match=r"^the checkpoint of step 4: 'history' \[0:1,0:1\] .*, and element 0 is 1.0 and 2.0 on"
    ):
        go(Diverging(range(ROWS), {"counting": "1"}))
    assert [path.name for path in committed(run_options.out)] == ["step-00000002"]
    assert go(counting(), resume=True).step == 6


class Unequal(Counting):
    """A process with two devices, whose weights differ after step 1."""

    def weight_replicas(self) -> Iterator[HeldReplica]:
        for device, value in enumerate((1.0, 2.0)):
            (box,) = boxes_of({"w 0": [value]})
            yield HeldReplica(device=device, axes="fsdp", box=box)


def test_a_run_ends_after_a_first_step_that_left_unequal_weights(tmp_path: Any) -> None:
    with pytest.raises(RunError) as caught:
        run(
            options(tmp_path),
            plan_of(),
            Silent(),
            connection=NOBODY,
            make_engine=made(Unequal(range(ROWS), {"counting": "1"})),
        )
    assert str(caught.value) == (
        "step 1: weight 'w' [0:1,0:1] must have the same bits on all devices that hold it, and has not (processes 0). This step was not "
        "saved. A device has read or computed other values: start again from the newest checkpoint, and if it happens again, leave the "
        "machine out."
    )
    assert not committed(tmp_path)
