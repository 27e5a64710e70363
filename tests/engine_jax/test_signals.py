"""Ctrl-C and SIGTERM save a checkpoint and end the run; a killed run resumes from its last checkpoint. No step is lost or repeated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.runs.loop import Loop
from shardwright.runs.processes.signals import CAUGHT
from shardwright.training.options import Silent, StepRecord
from tests.engine_jax.commands import (
    FSDP,
    LLAMA3,
    assert_same_bits,
    checkpoints,
    compiled_once,
    directory_of,
    metrics,
    results,
    saved,
    train,
)

LAST = 24
STEPS = ["--steps", f"{LAST}"]
"""Enough steps that the run is still in progress when the signal arrives."""

WAIT_S = 240


@pytest.fixture(scope="module", autouse=True)
def one_compilation() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    assert train(LLAMA3, out, *FSDP, *STEPS) == 0
    return out


def send(number: signal.Signals, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal while step ``at`` is reported."""
    report = Silent.step

    def step(self: Silent, record: StepRecord) -> None:
        report(self, record)
        if record.step == at:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Silent, "step", step)


def assert_goes_on_as(out: Path, straight: Path) -> None:
    assert train(LLAMA3, out, *FSDP, *STEPS, "--resume") == 0
    assert results(out) == results(straight)
    assert_same_bits(saved(out, LAST), saved(straight, LAST))


@pytest.mark.parametrize("number", CAUGHT, ids=str)
def test_a_signal_saves_and_ends_the_run(
    number: signal.Signals, straight: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    handlers = [signal.getsignal(caught) for caught in CAUGHT]
    with monkeypatch.context() as patched:
        send(number, 3, patched)
        assert train(LLAMA3, tmp_path, *FSDP, *STEPS, "--json") == 0
    assert '"ended": "interrupted"' in capsys.readouterr().out
    assert [signal.getsignal(caught) for caught in CAUGHT] == handlers
    assert checkpoints(tmp_path) == ["step-00000003"]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert_goes_on_as(tmp_path, straight)


def test_a_signal_after_the_check_whether_to_save_takes_effect_after_the_next_step(tmp_path: Path, monkeypatch) -> None:
    def is_due(_: Loop, number: int) -> bool:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(Loop, "_is_due", is_due)
    assert train(LLAMA3, tmp_path, *FSDP, *STEPS, "--json") == 0
    assert checkpoints(tmp_path) == ["step-00000004"]
    assert len(metrics(tmp_path)) == 4


def test_a_signal_in_the_last_step_ends_the_run_as_interrupted(tmp_path: Path, monkeypatch, capsys) -> None:
    send(signal.SIGTERM, 5, monkeypatch)
    assert train(LLAMA3, tmp_path, *FSDP, *STEPS, "--stop-after", "5", "--json") == 0
    assert '"ended": "interrupted"' in capsys.readouterr().out
    assert checkpoints(tmp_path) == ["step-00000005"]


def started(out: Path, environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = ["shardwright", "train", *LLAMA3, "--batch", "8", "--out", str(out), *FSDP, *STEPS, "--devices", "8"]
    return subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_lines(process: subprocess.Popen[str], path: Path, number: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"{number} steps were not done: {process.communicate()}")


def test_a_user_stops_a_run(straight: Path, tmp_path: Path, user_environment, capsys) -> None:
    process = started(tmp_path, user_environment)
    wait_for_lines(process, tmp_path / "metrics.jsonl", 2)
    # A second command changes nothing, with --resume or without.
    for more in ([], ["--resume"]):
        assert train(LLAMA3, tmp_path, *FSDP, *STEPS, *more) == 2
        assert re.match(
            rf"shardwright: {tmp_path} is held by another run: process {process.pid} on \S+, since \S+ \S+ UTC: shardwright train ",
            capsys.readouterr().err,
        )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert err == ""
    last = len(metrics(tmp_path))
    assert 2 <= last < LAST
    saved_in = directory_of(tmp_path, last)
    assert (
        f"SIGINT: stopped after step {last}; saved in {saved_in}\ninterrupted after step {last} of {LAST}, loss" in out
    )
    assert checkpoints(tmp_path) == [saved_in.name]
    assert_goes_on_as(tmp_path, straight)


def test_a_killed_run_resumes_from_its_checkpoint(straight: Path, tmp_path: Path, user_environment) -> None:
    process = started(tmp_path, user_environment, "--checkpoint-every", "3")
    wait_for_lines(process, tmp_path / "metrics.jsonl", 5)
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert len(metrics(tmp_path)) < LAST
    assert_goes_on_as(tmp_path, straight)
    assert not [name for name in checkpoints(tmp_path) if "saving" in name]
