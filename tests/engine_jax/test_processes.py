"""A run of two processes: the same numbers as in one process, one checkpoint, and both end together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shardwright.checkpoint import latest
from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh
from shardwright.engine_jax.io.mesh import device_mesh
from tests.conftest import ROOT
from tests.engine_jax.commands import (
    LLAMA3,
    TEXT,
    assert_same_bits,
    checkpoints,
    compiled_once,
    directory_of,
    flip,
    metrics,
    results,
    saved,
    train,
)
from tests.matrix import rest
from tests.typed import once

STEPS = ["--steps", "40", "--checkpoint-every", "3"]
TWO = ["--layout", "fsdp", "--mesh", "fsdp=2"]
"""One device per process: a sum of two terms has the same value in both orders."""
IN_STAGES = ["--layout", "pp", "--mesh", "stage=2,fsdp=1", "--microbatches", "2"]
MIXTRAL = ["mixtral-test", "--set", "num_layers=1", "--length", "32", "--data", TEXT]
OF_TWO_EACH = [
    (LLAMA3, ["--layout", "fsdp-tp", "--mesh", "fsdp=2,tensor=2"]),
    # Rows, experts and their tokens are sharded over both.
    rest(MIXTRAL, ["--layout", "ep-as-cp", "--mesh", "fsdp=1,expert=4", "--move", "attention=ring,moe=all-to-all"]),
]

WAIT_S = 240


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def pair(
    folder: Path,
    environment: Mapping[str, str],
    out: Path,
    options: list[str],
    *,
    model: list[str] = LLAMA3,
    devices: int = 2,
    own: tuple[list[str], list[str]] = ([], []),
    slurm: bool = False,
    stopped: int | None = None,
) -> list[Ended]:
    """How two processes of one run ended. ``own``: further options of each; ``stopped``: a stopped process, continued at the end."""
    port = free_port()
    where = ["--coordinator", f"localhost:{port}", "--processes", "2"]
    started = []
    for index in range(2):
        told = [] if slurm else [*where, "--process", f"{index}"]
        command = ["train", *model, "--batch", "8", "--out", f"{out}", *options, "--devices", f"{devices}"]
        command = once([*command, *told, *own[index]])
        tasks = slurm_variables(index, port) if slurm else {}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.engine_jax.member", f"{folder}", *command],
                env={**environment, **tasks},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [("", "")] * 2
    for index in (0, 1) if stopped is None else (1 - stopped, stopped):
        if index == stopped:
            started[index].send_signal(signal.SIGCONT)
        said[index] = started[index].communicate(timeout=WAIT_S)
    return [Ended(process.returncode, *text) for process, text in zip(started, said, strict=True)]


def slurm_variables(index: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": f"{index}",
        "SLURM_LOCALID": f"{index}",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "JAX_COORDINATOR_PORT": f"{port}",
    }


@pytest.fixture(scope="module", autouse=True)
def one_compilation() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def environment(tmp_path_factory, user_environment) -> dict[str, str]:
    """The environment of the processes: only the simulated devices that they request, and one cache of compiled programs."""
    kept = {**os.environ, "XLA_FLAGS": user_environment["XLA_FLAGS"]}
    compiled = str(tmp_path_factory.mktemp("compiled"))
    return {**kept, "JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The first six steps of a run of one process on two devices."""
    out = tmp_path_factory.mktemp("one")
    assert train(LLAMA3, out, *TWO, *STEPS, "--stop-after", "6") == 0
    return out


def only_until(step: int, run: Path, out: Path) -> Path:
    """A copy of a run of six steps, without the checkpoint after ``step``."""
    shutil.copytree(run, out)
    shutil.rmtree(directory_of(out, 6))
    assert checkpoints(out) == [directory_of(out, step).name]
    return out


def rows_read(folder: Path, index: int) -> set[int]:
    return {int(line) for line in (folder / f"read-{index}").read_text().split()}


@pytest.fixture(scope="module")
def two(tmp_path_factory, environment) -> tuple[Path, Path, list[Ended]]:
    """The same run with two processes, in the environment of Slurm."""
    folder = tmp_path_factory.mktemp("two")
    ended = pair(folder, environment, folder / "out", [*TWO, *STEPS, "--stop-after", "6"], slurm=True)
    return folder, folder / "out", ended


def test_the_same_bits_as_one_process(one: Path, two: tuple[Path, Path, list[Ended]]) -> None:
    _, out, ended = two
    assert [(process.code, process.err) for process in ended] == [(0, "")] * 2
    assert results(out) == results(one)
    assert checkpoints(out) == ["step-00000003", "step-00000006"]
    for step in (3, 6):
        assert_same_bits(saved(out, step), saved(one, step))


def test_only_the_first_process_prints(two: tuple[Path, Path, list[Ended]]) -> None:
    _, _, (first, second) = two
    assert second.out == ""
    found = "(Slurm: SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_STEP_NODELIST=localhost)"
    assert re.search(rf"^2 processes meet at localhost:\d+ {re.escape(found)}$", first.out, re.MULTILINE)
    assert "stopped after step 6 of 40, loss" in first.out
    assert "Gloo" not in first.out


def test_each_process_reads_its_own_rows(two: tuple[Path, Path, list[Ended]]) -> None:
    folder, _, _ = two
    first, second = rows_read(folder, 0), rows_read(folder, 1)
    assert len(first) >= 6 * 4
    assert len(second) >= 6 * 4
    assert not first & second


def test_a_checkpoint_by_two_resumes_in_one(one: Path, two: tuple[Path, Path, list[Ended]], tmp_path: Path) -> None:
    out = only_until(3, two[1], tmp_path / "out")
    assert train(LLAMA3, out, *TWO, *STEPS, "--stop-after", "6", "--resume") == 0
    assert results(out) == results(one)
    assert_same_bits(saved(out, 6), saved(one, 6))


def test_a_signal_to_one_ends_both_and_one_s_checkpoint_resumes_in_two(one: Path, tmp_path: Path, environment) -> None:
    """Both resume from a checkpoint that neither finds damaged: the newest one has a flipped bit, in a box that one of them reads."""
    out = Path(shutil.copytree(one, tmp_path / "out"))
    flip(directory_of(out, 6))
    with_signal = {**environment, "SIGNAL": "5 1 SIGTERM"}
    first, second = pair(tmp_path, with_signal, out, [*TWO, "--steps", "40", "--resume"])
    (damaged,) = (out / "checkpoints").glob("step-00000006.damaged-*")
    assert f"kept under another name, damaged: {damaged}" in first.out
    shutil.rmtree(damaged)
    assert [(first.code, first.err), (second.code, second.err)] == [(0, "")] * 2
    last = len(metrics(out))
    # The first process may have begun the sixth step.
    assert last in (5, 6)
    assert f"SIGTERM in process 1: stopped after step {last}; saved in {directory_of(out, last)}\n" in first.out
    assert checkpoints(out) == ["step-00000003", f"step-{last:08d}"]
    assert results(out) == results(one)[:last]
    if last == 6:
        assert_same_bits(saved(out, 6), saved(one, 6))


@pytest.mark.parametrize(("model", "layout"), OF_TWO_EACH, ids=["dense", "experts"])
def test_two_devices_each_against_four(model: list[str], layout: list[str], tmp_path: Path, environment) -> None:
    """Gloo sums four terms in another order than one process does, so the last bits differ."""
    options = [*layout, "--steps", "3", "--lr", "1e-3"]
    assert train(model, tmp_path / "one", *options) == 0
    ended = pair(tmp_path, environment, tmp_path / "two", options, model=model, devices=4)
    assert [(process.code, process.err) for process in ended] == [(0, "")] * 2
    for name, of_one in (("loss", 1e-6), ("grad_norm", 1e-6), ("tokens", 0), ("dropped", 0)):
        ours, theirs = ([line[name] for line in metrics(tmp_path / out)] for out in ("two", "one"))
        np.testing.assert_allclose(ours, theirs, rtol=of_one, atol=0)


@pytest.mark.parametrize(("killed", "layout"), [rest(0, TWO), rest(1, TWO), (1, IN_STAGES)])
def test_a_killed_process_ends_the_other_with_a_message(
    killed: int, layout: list[str], tmp_path: Path, environment
) -> None:
    out = tmp_path / "out"
    # JAX aborts the other within milliseconds of the loss of process 0. It must not come first, however busy the machine is.
    told = {**environment, "SIGNAL": f"3 {killed} SIGKILL", "LATE": "0.5"}
    started = time.monotonic()
    ended = pair(tmp_path, told, out, [*layout, "--steps", "40", "--checkpoint-every", "1"])
    died = (out / "metrics.jsonl").stat().st_mtime
    assert time.time() - died < 60, time.monotonic() - started
    assert ended[killed].code == -signal.SIGKILL
    assert ended[1 - killed].code == 1
    said = ended[1 - killed].err.splitlines()[-1]
    assert said.startswith(f"shardwright: process {1 - killed} of 2: process {killed} of 2")
    assert said.endswith(
        "is gone: it was killed, or its machine is lost. So this one ends too. Start all of them again, with --resume."
    )
    found = latest(out)
    assert found.checkpoint is not None
    assert found.checkpoint.point.step in (2, 3)
    assert found.passed_over == ()


# Processes that load no framework show the same in `tests/runs/test_stall.py`.
@pytest.mark.matrix
def test_a_stopped_process_is_named_by_the_other_which_ends(tmp_path: Path, environment) -> None:
    out = tmp_path / "out"
    told = {**environment, "SIGNAL": "3 1 SIGSTOP"}
    options = [*TWO, "--steps", "40", "--checkpoint-every", "1", "--stall-timeout", "2"]
    other, _ = pair(tmp_path, told, out, options, stopped=1)
    assert other.code == 1
    assert re.fullmatch(
        r"shardwright: process 0 of 2: process 1 of 2 \(\S+, \S+\): no answer for \d+ s, since step [23]: stopped, or the "
        r"machine hangs\. That is longer than --stall-timeout, 2 s, beyond the longest step, [\d.]+ s\. So all end\. Start all "
        r"of them again, with --resume\.\n",
        other.err,
    ), other.err
    found = latest(out)
    assert found.checkpoint is not None
    assert found.checkpoint.point.step in (2, 3)
    assert found.passed_over == ()


def test_another_text_in_one_is_refused_by_both(tmp_path: Path, environment) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text(f"one of {len(texts)} texts, {text.name}. " * 100)
    own = (["--data", f"{texts[0]}"], ["--data", f"{texts[1]}"])
    ended = pair(tmp_path, environment, tmp_path / "out", [*TWO, "--steps", "4"], own=own)
    for process in ended:
        assert process.code == 2
        assert process.err.startswith(
            "shardwright: before the first step: the 2 processes of this run do not agree:\n  corpus: '"
        )
        assert process.err.endswith("Give all of them the same command, text and files. Nothing was started.\n")
        assert len(process.err.splitlines()) == 3
    assert not (tmp_path / "out").exists()


def test_devices_are_counted_over_all_processes(tmp_path: Path, capsys) -> None:
    where = ["--coordinator", "a:1", "--processes", "2", "--process", "1"]
    assert (
        train(
            LLAMA3, tmp_path / "out", "--layout", "fsdp", "--mesh", "fsdp=7", "--devices", "7", "--steps", "1", *where
        )
        == 2
    )
    assert capsys.readouterr().err == (
        "shardwright: --devices is 7, and must be a multiple of the number of processes, which is 2 (from options): "
        "each has as many.\n"
    )


def test_no_process_is_without_a_device(monkeypatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(InputError) as error:
        device_mesh(Mesh.of(fsdp=4))
    assert str(error.value) == (
        "the mesh fsdp 4 needs 4 devices, and the 2 processes have 8: some would have no device in the run. "
        "Give a mesh of 8 devices (--mesh), or start fewer processes."
    )
