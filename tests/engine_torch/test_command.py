"""`shardwright train --engine torch`: the ranks that this command starts, and how they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardwright.cli.main import main
from tests.engine_jax.commands import compiled_once
from tests.engine_torch.commands import (
    KILLED_WITHIN_S,
    flip,
    killed_in_load,
    losses,
    pid_of_rank,
    run,
    started,
    wait_for,
)
from tests.matrix import rest

MODEL = ["mixtral-test", "--batch", "8", "--length", "16", "--steps", "6", "--set", "num_layers=1"]
ON_JAX = [*MODEL, "--layout", "ep-as-cp", "--mesh", "fsdp=2,expert=2", "--devices", "4"]
ON_TWO = [*MODEL, "--engine", "torch", "--layout", "fsdp-tp", "--mesh", "fsdp=1,tensor=2"]
TOLERANCE = 1e-4


def test_each_engine_goes_on_where_the_other_stopped(tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    with compiled_once():
        assert main(["train", *ON_JAX, "--stop-after", "2", "--out", str(out)]) == 0
        done = run([*ON_TWO, "--resume", "--stop-after", "4", "--out", str(out)])
        assert done.returncode == 0, done.stderr
        assert main(["train", *ON_JAX, "--resume", "--out", str(out)]) == 0
        assert main(["train", *ON_JAX, "--out", str(whole)]) == 0
    assert len(losses(out)) == 6
    assert losses(out) == pytest.approx(losses(whole), abs=TOLERANCE)


def test_a_killed_rank_ends_the_run_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*ON_TWO, "--out", str(out), "--checkpoint-every", "1"]
    with started([*arguments, "--steps", "1000"]) as process:
        wait_for(lambda: len(list(out.glob("checkpoints/step-????????"))) >= 2, process)
        killed = time.monotonic()
        os.kill(pid_of_rank(process, 1), signal.SIGKILL)
        _, said = process.communicate(timeout=2 * KILLED_WITHIN_S)
        took = time.monotonic() - killed
    assert took < KILLED_WITHIN_S
    assert process.returncode == 1
    assert "shardwright: rank 1 of 2 was ended by SIGKILL." in said
    assert "process 1 of 2" in said
    assert "Traceback" not in said
    before = len(losses(out))
    # Again while all load: weights that both need are read by one of them.
    folder = tmp_path / "start"
    folder.mkdir()
    ended, read = killed_in_load([*arguments, "--steps", "1000", "--resume"], 1, folder)
    assert read.startswith(str(sorted(out.glob("checkpoints/step-????????"))[-1])), ended.stderr
    assert ended.returncode == 1
    assert "shardwright: rank 1 of 2 was ended by SIGKILL." in ended.stderr
    assert "process 1 of 2" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(losses(out)) == before
    # The newest checkpoint has a flipped bit, in a box that one of the ranks reads: all read the previous one.
    newest = sorted(out.glob("checkpoints/step-????????"))[-1]
    flip(newest)
    done = run([*arguments, "--steps", "1000", "--resume", "--stop-after", str(before + 1)])
    assert done.returncode == 0, done.stderr
    assert len(losses(out)) == before + 1
    assert f"kept under another name, damaged: {newest}.damaged-" in done.stdout


@pytest.mark.matrix
def test_a_stopped_rank_is_named_and_ends_with_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*ON_TWO, "--out", str(out), "--checkpoint-every", "1", "--steps", "1000", "--stall-timeout", "2"]
    with started(arguments) as process:
        wait_for(lambda: len(list(out.glob("checkpoints/step-????????"))) >= 2, process)
        ranks = [pid_of_rank(process, rank) for rank in range(2)]
        os.kill(ranks[1], signal.SIGSTOP)
        _, said = process.communicate(timeout=2 * KILLED_WITHIN_S)
    assert process.returncode == 1
    assert re.fullmatch(
        r"shardwright: process 0 of 2: process 1 of 2 \(\S+, \S+\): no answer for \d+ s, since step \d+: stopped, or the "
        r"machine hangs\. That is longer than --stall-timeout, 2 s, beyond the longest step, [\d.]+ s\. So all end\. Start all "
        r"of them again, with --resume\.\n",
        said,
    ), said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_sigterm_saves_and_ends_all_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started([*ON_TWO, "--steps", "1000", "--out", str(out)]) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= 1, process)
        process.terminate()
        told, said = process.communicate(timeout=2 * KILLED_WITHIN_S)
    assert process.returncode == 0, said
    assert re.search(r"SIGTERM in process \d: stopped after step \d+; saved in", told)
    assert len(list(out.glob("checkpoints/step-*"))) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        rest(["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--set", "num_layers=3", "--mesh", "data=1,fsdp=1,tensor=3"], ""),
    ],
)
def test_a_users_error_is_reported_once(tmp_path: Path, more: list[str], message: str) -> None:
    done = run([*ON_TWO, "--out", str(tmp_path / "out"), *more])
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr.count(message) == 1 if message else True
    assert not (tmp_path / "out").exists()


def test_a_mesh_of_another_size_than_the_ranks_is_reported_with_both_numbers(refused: Refused) -> None:
    under_torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    assert "has 2 devices, and there are 4 processes" in refused(under_torchrun)


Refused = Callable[[Mapping[str, str]], str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """The only line on standard error of a rank that does not start, by its environment variables."""

    def refused(variables: Mapping[str, str]) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["train", *ON_TWO, "--out", str(tmp_path / "out")]) == 2
        message = capfd.readouterr().err
        assert message.count("\n") == 1, message
        return message

    return refused


# Ranks that load no framework show the same in `tests/cli/test_ranks.py`.
@pytest.mark.matrix
def test_ranks_end_with_the_command_that_started_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started([*ON_TWO, "--steps", "1000", "--out", str(out)]) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists(), process)
        ranks = [pid_of_rank(process, rank) for rank in range(2)]
        # A stopped rank ends with it too.
        os.kill(ranks[1], signal.SIGSTOP)
        process.kill()
        deadline = time.monotonic() + KILLED_WITHIN_S
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline, ranks
            time.sleep(0.1)
        _, errors = process.communicate()
    assert "the command that started the ranks is gone" in errors


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "the environment has RANK and lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE is 0, and must be"),
    ],
)
def test_missing_variables_of_torchrun_are_reported(refused: Refused, variables: dict[str, str], message: str) -> None:
    assert message in refused(variables)


@pytest.mark.parametrize("listens", [True, rest(False)])
def test_a_missing_store_is_waited_for_until_the_join_timeout(tmp_path: Path, listens: bool) -> None:
    """Nothing listens at the port, or something that never answers. In its own process, in which PyTorch keeps trying."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not listens:
            listener.close()
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = run([*ON_TWO, "--out", str(tmp_path / "out"), "--join-timeout", "2"], variables)
    assert done.returncode == 2
    assert f"has no store at 127.0.0.1:{port}" in done.stderr
    assert "--join-timeout" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
