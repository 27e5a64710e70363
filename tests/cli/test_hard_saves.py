"""Asynchronous saves of both engines through the command: a full disk, two runs in one folder, a kill."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.checkpoint import latest, verify
from tests.runs.test_run import contents

pytestmark = pytest.mark.matrix

ENTRY = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
COMMAND = [
    *("train", "llama3-test", "--set", "num_layers=1", "embed=64", "mlp=128", "--length", "32", "--batch", "8"),
    *("--steps", "1000", "--layout", "fsdp", "--mesh", "fsdp=2", "--async-checkpoints", "--checkpoint-every", "2"),
]
ENGINES = {"jax": ["--devices", "2"], "torch": ["--engine", "torch"]}
WAIT_S = 240.0


@pytest.fixture(params=ENGINES)
def command(request: pytest.FixtureRequest) -> list[str]:
    """A run on an engine."""
    return [sys.executable, "-c", ENTRY, *COMMAND, *ENGINES[request.param]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def started(
    command: list[str], out: Path, environment: dict[str, str], *more: str, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, "--out", str(out), *more],
        env={**environment, "OMP_NUM_THREADS": "1"},
        preexec_fn=before,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def done(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in out + err, err
    return process.returncode, out, err


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.005)


def steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-????????"))


def assert_goes_on(command: list[str], out: Path, environment: dict[str, str]) -> None:
    """The run goes on from the newest checkpoint, which is intact, to the third step after it."""
    found = latest(out)
    assert found.checkpoint is not None
    assert found.passed_over == ()
    assert verify(out)["ok"]
    step = found.checkpoint.point.step
    code, said, error = done(started(command, out, environment, "--resume", "--stop-after", str(step + 3)))
    assert code == 0, error
    assert f"resumed from {found.checkpoint.directory}" in said.replace("\n", "")
    assert steps(out)[-1] == f"step-{step + 3:08d}"
    assert verify(out)["ok"]


def test_a_full_disk(command: list[str], out: Path, user_environment: dict[str, str]) -> None:
    assert done(started(command, out, user_environment, "--stop-after", "2"))[0] == 0
    before = contents(out / "checkpoints" / "step-00000002")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    code, _, error = done(started(command, out, user_environment, "--resume", before=small_disk))
    assert code == 2
    assert "step-00000004: this checkpoint could not be written: File too large." in error
    assert steps(out) == ["step-00000002"]
    assert contents(out / "checkpoints" / "step-00000002") == before
    assert_goes_on(command, out, user_environment)


def test_two_runs_in_one_folder(command: list[str], out: Path, user_environment: dict[str, str]) -> None:
    process = started(command, out, user_environment)
    wait_for(lambda: out.exists() and steps(out), process)
    for more in ([], ["--resume"]):
        code, _, error = done(started(command, out, user_environment, *more))
        assert code == 2
        assert error.startswith(f"shardwright: {out} is held by another run: process "), error
    process.send_signal(signal.SIGTERM)
    code, said, error = done(process)
    assert code == 0, error
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert steps(out)[-1] == f"step-{last:08d}"
    assert f"stopped after step {last}; saved in" in said
    assert_goes_on(command, out, user_environment)


def test_a_kill_while_a_save_is_in_flight(command: list[str], out: Path, user_environment: dict[str, str]) -> None:
    process = started(command, out, user_environment)
    wait_for(lambda: out.exists() and steps(out) and list(out.glob("checkpoints/*.saving-*")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    # Ranks are in sessions of their own, and end with the command that started them.
    wait = time.monotonic() + WAIT_S
    while (lock := out / ".lock").exists() and _is_held(lock):
        assert time.monotonic() < wait
        time.sleep(0.05)
    assert_goes_on(command, out, user_environment)


def _is_held(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
