"""The ranks that one command starts, and how they end. Here they are very small programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.cli.running import ranks as ranks_of_a_command
from shardwright.cli.running import train
from shardwright.cli.running.ranks import PARENT, RanksError, is_rank, launch
from shardwright.core.findings.errors import InputError

RANK = "import os, sys, signal, time; rank = os.environ['RANK']; "
WAITS = "time.sleep(60)"
ON_TWO = ["mixtral-test", "--engine", "torch", "--layout", "fsdp-tp", "--mesh", "fsdp=1,tensor=2", "--batch", "8"]


@pytest.fixture
def do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The outcome of two ranks that run a program."""

    def do(program: str, count: int = 2) -> int:
        monkeypatch.setattr(ranks_of_a_command, "COMMAND", RANK + program)
        return launch(count, ["an argument"], tmp_path)

    monkeypatch.setattr(ranks_of_a_command, "GRACE_S", 0.2)
    return do


def test_no_rank_is_started_for_an_out_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("started"))
    for out in ("mine.yaml", "mine.yaml/a"):
        assert main(["train", *ON_TWO, "--steps", "1", "--out", str(tmp_path / out)]) == 2
        assert capfd.readouterr().err == (
            f"shardwright: --out {tmp_path / out}: {tmp_path}/mine.yaml is not a folder. Give a folder, or a name that is free.\n"
        )


def test_ranks_that_end_well_know_their_number_and_arguments(do, capfd: pytest.CaptureFixture[str]) -> None:
    checked = "assert os.environ['WORLD_SIZE'] == '3' and sys.argv[1:] == ['an argument']; "
    assert do(checked + "print('rank', rank, os.environ['LOCAL_RANK'])", count=3) == 0
    assert capfd.readouterr() == ("rank 0 0\n", "")


def test_only_the_first_rank_prints(do, capfd: pytest.CaptureFixture[str]) -> None:
    assert do("sys.stderr.write(f'said by {rank}\\n'); sys.exit(2)") == 2
    assert capfd.readouterr().err == "said by 0\n"


@pytest.mark.parametrize("first", ["time.sleep(60)", "sys.exit(0)"])
def test_a_rank_that_fails_before_the_others_know_is_reported(
    do, first: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"{first} if rank == '0' else (sys.stderr.write('no memory left\\n'), sys.exit(3))"
    captured = "rank 1 of 2 ended with exit code 3. The others were ended too.\n  no memory left"
    if "sleep" in first:
        with pytest.raises(RanksError) as caught:
            do(program)
        assert (str(caught.value), caught.value.exit_code) == (f"{captured}\nNothing was trained: start it again.", 1)
        (tmp_path / "metrics.jsonl").touch()
        with pytest.raises(RanksError, match=r"Go on with --resume, from the newest checkpoint[.]$"):
            do(program)
    else:
        assert do(program) == 3
        assert captured in capfd.readouterr().err


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, None)])
def test_a_killed_rank_is_named_with_its_signal(do, number: int, name: str | None) -> None:
    with pytest.raises(RanksError, match=f"^rank 1 of 2 was ended by {name or f'signal {int(number)}'}[.] The others"):
        do(f"{WAITS} if rank == '0' else os.kill(os.getpid(), {int(number)})")


@pytest.mark.parametrize(
    ("number", "raised", "exit_code"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, RanksError, 143)]
)
def test_a_signal_ends_ranks_that_have_not_begun(do, number: int, raised: Any, exit_code: int | None) -> None:
    # The first that is there sends it, at whatever moment: the other one may not have been started.
    with pytest.raises(raised) as caught:
        do(
            f"signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getppid(), {int(number)}) if rank == '0' else None; {WAITS}"
        )
    assert getattr(caught.value, "exit_code", None) == exit_code


def test_an_interrupt_that_is_lost_on_the_first_rank_is_one(do) -> None:
    lost = "signal.signal(signal.SIGINT, signal.SIG_IGN if rank == '0' else lambda *_: sys.exit(130)); "
    with pytest.raises(KeyboardInterrupt):
        do(lost + f"os.kill(os.getppid(), signal.SIGINT) if rank == '1' else None; {WAITS}")


def test_ranks_that_save_at_a_signal_end_well(do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handled = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); open('ready' + rank, 'x').close(); "
    when_both_do = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('ready0'), True)]; "
    assert do(f"{handled}{when_both_do}os.kill(os.getppid(), signal.SIGTERM) if rank == '1' else None; {WAITS}") == 0


def test_a_rank_that_cannot_be_started_ends_those_that_were(do, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Few(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if started:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Few)
    with pytest.raises(InputError, match=r"^rank 1 of 2 could not be started: Resource temporarily unavailable[.]"):
        do(WAITS)
    assert started[0].returncode == -signal.SIGKILL


def test_ranks_import_nothing_from_the_folder_they_are_started_in(
    do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    assert do("import yaml") == 0


def test_off_the_main_thread_signal_handlers_stay(do) -> None:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(do("sys.exit(0)")))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the command has --processes 1, which its ranks get too."""
    assert not is_rank({PARENT: "1" if os.getppid() != 1 else "2"})
    numbered = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {PARENT: str(os.getppid()), **numbered}.items():
        monkeypatch.setenv(name, value)
    trained = []
    monkeypatch.setattr(train, "_engine", lambda *_: lambda run, *_: trained.append(run.processes.index) or Ended())
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("a rank starts ranks"))
    more = ["--steps", "1", "--length", "16", "--processes", "1", "--out", str(tmp_path / "out")]
    assert main(["train", *ON_TWO, *more]) == 0
    assert trained == [1]
    with pytest.raises(AssertionError, match="a rank starts no ranks"):
        launch(2, [], tmp_path)


class Ended:
    def to_json(self) -> dict[str, object]:
        return {}


LAUNCHED = """
import sys
from pathlib import Path
from shardwright.cli.running import ranks
own = "import os, time, pathlib; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid())); time.sleep(60)"
ours = "sys.exit(main(sys.argv[1:]))"
assert ranks.COMMAND.endswith(ours)
ranks.COMMAND = ranks.COMMAND.removesuffix(ours) + own
ranks.launch(2, sys.argv[1:], Path(sys.argv[1]))
"""
"""A command whose ranks begin as those of `shardwright train` do, and then write their numbers of processes."""


def test_ranks_end_with_the_command_that_started_them(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHED, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    try:
        while len(numbers := [path.read_text() for path in sorted(tmp_path.iterdir())]) < 2 or "" in numbers:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, numbers
            time.sleep(0.05)
        # A stopped rank ends with it too.
        os.kill(int(numbers[1]), signal.SIGSTOP)
    finally:
        process.kill()
    while any(Path(f"/proc/{number}").exists() for number in numbers):
        assert time.monotonic() < deadline, numbers
        time.sleep(0.1)
    _, errors = process.communicate()
    assert "the command that started the ranks is gone" in errors


def test_with_json_there_is_an_object_for_every_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks_of_a_command, "COMMAND", f"{RANK} {WAITS} if rank == '0' else os.kill(os.getpid(), 9)")
    monkeypatch.setattr(ranks_of_a_command, "GRACE_S", 0.2)
    more = ["--steps", "1", "--length", "16", "--out", str(tmp_path / "out"), "--json"]
    assert main(["train", *ON_TWO, *more]) == 1
    captured = capfd.readouterr()
    assert json.loads(captured.out)["error"]["message"].startswith("rank 1 of 2 was ended by SIGKILL.")
    assert captured.err.startswith("shardwright: rank 1 of 2 was ended by SIGKILL.")
    # And by the first rank, which learns of another one outside its main thread.
    train._AsJson().end("process 0 of 2: process 1 is gone", 1)
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"error": {"exit_code": 1, "message": "process 0 of 2: process 1 is gone"}}
    assert captured.err == "shardwright: process 0 of 2: process 1 is gone\n"
