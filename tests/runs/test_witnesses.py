"""A process of a user's own program that is killed is named by the others, as far as they can see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardwright.checkpoint import CheckpointError
from shardwright.runs.own_program import witnesses
from shardwright.runs.own_program.members import connected
from shardwright.runs.own_program.witnesses import this_process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another process, which waits, and says what it is to the others."""
    program = (
        "import json; from shardwright.runs.own_program.witnesses import this_process\n"
        "print(json.dumps(this_process()), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def lost(other: subprocess.Popen[str], ends: bool, **changed: Any) -> str:
    """The message of a process whose second exchange with two others fails."""

    assert other.stdout is not None
    witness = {**json.loads(other.stdout.readline()), **changed}
    exchanged = []

    def gather(value: Any) -> list[Any]:
        exchanged.append(value)
        if len(exchanged) == 1:
            return [value, [witness, 7], [this_process(), 8]]
        if ends:
            # Nobody waits for it: it is a zombie.
            other.kill()
        raise RuntimeError("connection closed\nby peer")

    members = connected(0, 3, "rank", gather, (RuntimeError,))
    assert members.gather(6) == [6, 7, 8]
    with pytest.raises(CheckpointError) as caught:
        members.gather(6)
    return str(caught.value)


def test_a_process_that_was_killed_is_named(other: subprocess.Popen[str]) -> None:
    named = rf"rank 1 \(process {other.pid} on \S+\) has ended, killed or with an error"
    assert re.fullmatch(rf"the 3 ranks could not exchange values: {named}\. connection closed", lost(other, ends=True))


@pytest.mark.parametrize(
    ("ends", "changed"), [(False, {}), (True, {"machine": "another"}), (True, {"started": None})], ids=str
)
def test_what_cannot_be_seen_is_not_claimed(
    other: subprocess.Popen[str], ends: bool, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witnesses, "WAIT_S", 0.05)
    assert lost(other, ends, **changed).startswith(
        "the 3 ranks could not exchange values: one of them has ended, or their timeout has passed. connection"
    )


def test_another_process_of_the_same_number_is_another_one(other: subprocess.Popen[str]) -> None:
    assert "rank 1 (process" in lost(other, ends=False, started=1)
