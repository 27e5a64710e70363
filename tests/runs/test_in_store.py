"""A run whose checkpoints are in S3: it saves there, keeps, resumes and goes on from a step, and its folder has all else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import describe, open_checkpoint, verify
from shardwright.core.findings.errors import InputError
from shardwright.runs.store import key_of_run, recorded
from shardwright.storage.url import Url
from shardwright.training.options import RunOptions
from tests.matrix import some
from tests.runs.counting import counting, go, options, sums
from tests.storage.s3 import ROOT, Server, keys, put


@pytest.fixture
def stored(s3: Server, tmp_path: Path, request: pytest.FixtureRequest) -> RunOptions:
    """The options of a run that saves in S3 every second step."""
    del s3
    url = Url(f"s3://bucket/{request.node.name}")
    return replace(options(tmp_path), checkpoints=url, checkpoint_every=2)


def steps_saved(run_options: RunOptions) -> dict[int, int]:
    """The loss that each checkpoint holds, by its step."""
    found: dict[int, int] = {}
    for one in describe(run_options.saved_under)["checkpoints"]:
        checkpoint = open_checkpoint(one["directory"])
        found[checkpoint.point.step] = int(checkpoint.read_box("sums")[:, 0].sum())
    return found


def expected(run_options: RunOptions, *steps: int) -> dict[int, int]:
    known = sums(run_options, 6)
    return {step: known[step - 1] for step in steps}


@pytest.mark.parametrize("in_background", some([False, True], [0]))
def test_a_run_saves_there_and_goes_on_from_there(stored: RunOptions, in_background: bool) -> None:
    first = go(counting(), stored, stop_after=4, async_checkpoints=in_background)
    assert str(first.checkpoint) == f"{stored.checkpoints}/checkpoints/step-00000004"
    assert steps_saved(stored) == expected(stored, 4, 2)
    last = go(counting(), stored, resume=True, keep=2, async_checkpoints=in_background)
    assert (last.ended, last.loss) == ("finished", sums(stored, 6)[-1])
    assert steps_saved(stored) == expected(stored, 6, 4)
    assert verify(stored.saved_under)["ok"]
    lines = (stored.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == sums(stored, 6)
    assert sorted(path.name for path in stored.out.iterdir()) == ["checkpoints.txt", "metrics.jsonl", "run.jsonl"]


@pytest.mark.matrix
def test_a_run_goes_on_from_a_step_and_later_ones_are_set_aside(stored: RunOptions) -> None:
    go(counting(), stored)
    before = {name for name in keys(f"{str(stored.checkpoints)[12:]}/") if "step-00000006" in name}
    go(counting(), stored, resume_from=4)
    assert steps_saved(stored) == expected(stored, 6, 4, 2)
    after = {name for name in keys(f"{str(stored.checkpoints)[12:]}/") if "step-00000006" in name}
    assert {name for name in before if not name.endswith("manifest.json")} < after
    assert sum("manifest.json.set-aside-" in name for name in after) == 1


@pytest.mark.matrix
def test_a_damaged_checkpoint_is_skipped_and_kept(stored: RunOptions) -> None:
    go(counting(), stored, stop_after=4)
    ((name, data),) = [
        (name, data)
        for name, data in keys(f"{str(stored.checkpoints)[12:]}/").items()
        if "step-00000004" in name and name.endswith(".safetensors")
    ]
    put(name, data[:-1] + bytes([data[-1] ^ 1]))
    go(counting(), stored, resume=True)
    assert steps_saved(stored) == expected(stored, 6, 4, 2)
    assert any("manifest.json.damaged-" in name for name in keys(f"{str(stored.checkpoints)[12:]}/"))


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from shardwright.checkpoint.writing import save as saves
from shardwright.storage.url import Url
from tests.matrix import some
from tests.runs.counting import counting, go, options

commit = saves.commit


def killed(save, *arguments, **named):
    if save.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(save, *arguments, **named)


saves.commit = killed
go(counting(), replace(options(Path(sys.argv[1])), checkpoints=Url(sys.argv[2]), checkpoint_every=2))
"""


@pytest.mark.matrix
def test_a_run_that_was_killed_while_it_saved_goes_on_and_cleans_up(stored: RunOptions, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(stored.checkpoints)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    assert steps_saved(stored) == expected(stored, 2)
    known = recorded(stored.out)
    assert known is not None
    (left,) = describe(stored.saved_under)["under_way"]
    assert left.startswith(f"step-00000004/{known.key}-")
    ended = go(counting(), stored, resume=True)
    assert (ended.step, ended.loss) == (6, sums(stored, 6)[-1])
    assert steps_saved(stored) == expected(stored, 6, 4, 2)
    assert describe(stored.saved_under)["leftovers"] == []
    assert not any(left in name for name in keys(f"{str(stored.checkpoints)[12:]}/"))


def refused(run_options: RunOptions, **changes: Any) -> str:
    with pytest.raises(InputError) as raised:
        go(counting(), run_options, **changes)
    return str(raised.value)


def test_what_is_refused(stored: RunOptions, tmp_path: Path) -> None:
    go(counting(), stored, stop_after=2)
    assert refused(stored, out=tmp_path / "other") == (
        f"{stored.checkpoints} already holds a run. Give --resume to go on with it, or another --checkpoints for a new one."
    )
    assert refused(stored, checkpoints=None, resume=True) == (
        f"--resume: the checkpoints of the run in {stored.out} are in {stored.checkpoints}. Give --checkpoints {stored.checkpoints}."
    )
    assert "there is no such bucket" in refused(stored, checkpoints=Url("s3://none/run"), out=tmp_path / "other")
    # On another machine, whose folder is empty.
    assert go(counting(), stored, out=tmp_path / "other", resume=True).ended == "finished"


def test_a_copy_goes_on_here(stored: RunOptions) -> None:
    go(counting(), stored, stop_after=4)
    prefix = f"{str(stored.checkpoints)[12:]}/"
    for name, data in keys(prefix).items():
        target = stored.out / name.removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    go(counting(), stored, checkpoints=None, resume=True)
    here = replace(stored, checkpoints=None)
    assert steps_saved(here) == expected(stored, 6, 4, 2)


def test_the_key_of_a_run_is_its_folders_own(tmp_path: Path) -> None:
    store = Url("s3://bucket/run")
    assert key_of_run(tmp_path / "a", tmp_path / "a") is None
    first = key_of_run(tmp_path / "a", store)
    assert key_of_run(tmp_path / "a", store) == first
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints.txt").write_bytes((tmp_path / "a" / "checkpoints.txt").read_bytes())
    assert key_of_run(tmp_path / "b", store) != first
    assert key_of_run(tmp_path / "a", Url("s3://bucket/other")) != first
    (tmp_path / "a" / "checkpoints.txt").write_text("s3://bucket/run\n")
    assert recorded(tmp_path / "a") is None
