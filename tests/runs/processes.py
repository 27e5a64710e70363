"""Several processes of one run on an engine without a framework, and how they end when one of them stops.

Forked from one that has imported everything: `python -m tests.runs.processes FOLDER CASE`. As in a collective, no process
ends a step before all have come to it. Their standard error goes to FOLDER/stderr-I, and their exit codes to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple

from shardwright.core.findings.errors import ShardwrightError
from shardwright.runs.hold import held
from shardwright.training.cluster import Processes
from shardwright.training.options import Silent
from tests.conftest import ROOT
from tests.runs.counting import NOBODY, Counting, go, options
from tests.runs.test_group import free_port

COUNT, STALL_S = 3, 1
GIVE_UP_S = 0.5
AT = 4
"""The step in which it happens."""


class Ended(NamedTuple):
    code: int
    messages: list[str]


def several(folder: Path, case: str) -> tuple[list[Ended], float]:
    """How the processes ended in one of ``CASES``, and how long after it happened those that were not stopped did."""
    command = [sys.executable, "-m", "tests.runs.processes", str(folder), case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(ended.stdout)
    messages = [(folder / f"stderr-{index}").read_text().splitlines() for index in range(COUNT)]
    return [Ended(*one) for one in zip(answer["codes"], messages, strict=True)], answer["took_s"]


class FsdpGroup(Counting):
    """Its steps end together with those of the others; in step ``AT`` a process does what the case says."""

    barrier: Any
    do: Callable[[], None]
    gives_up: bool

    def step(self, batch: Any, before_update: Callable[[], None]):
        now = self._step + 1 == AT
        if now:
            self.do()
        # As Gloo does between CPUs, where a partner does not come.
        self.barrier.wait(GIVE_UP_S if now and self.gives_up else None)
        return super().step(batch, before_update)


def stopped(index: int) -> Callable[[int], None]:
    def do(ours: int) -> None:
        if ours == index:
            os.kill(os.getpid(), signal.SIGSTOP)

    return do


def hangs(ours: int) -> None:
    if ours == 1:
        time.sleep(1000)


def all_stop(ours: int) -> None:
    del ours
    os.kill(os.getpid(), signal.SIGSTOP)


CASES: dict[str, Callable[[int], None]] = {
    "the first stops": stopped(0),
    "another stops": stopped(1),
    "a collective gives up": stopped(1),
    "one hangs": hangs,
    "all stop for a while": all_stop,
    "held": lambda _: None,
}


def one(folder: Path, index: int, port: int, barrier: Any, case: str) -> int:
    os.dup2(os.open(folder / f"stderr-{index}", os.O_WRONLY | os.O_CREAT), 2)
    engine = FsdpGroup((index,) if index < COUNT - 1 else (COUNT - 1, COUNT), {"counting": "1"})
    engine.barrier, engine.do = barrier, lambda: CASES[case](index)
    engine.gives_up = "gives up" in case
    processes = Processes(
        count=COUNT,
        index=index,
        coordinator=f"localhost:{port}",
        found="a test",
        stall_timeout_s=300 if engine.gives_up else STALL_S,
    )
    connection = replace(NOBODY, lost=(BrokenBarrierError,))
    try:
        go(engine, options(folder), connection=connection, processes=processes, checkpoint_every=2, resume=True)
    except ShardwrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    return 0


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def main(folder: Path, case: str) -> None:
    out = options(folder).out
    out.mkdir()
    (out / "metrics.jsonl").touch()
    barrier, port = get_context("fork").Barrier(COUNT), free_port()
    pids = []
    with ExitStack() as holding:
        if case == "held":
            (out / "metrics.jsonl").unlink()
            holding.enter_context(held(out, Silent()))
        for index in range(COUNT):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    code = one(folder, index, port, barrier, case)
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        codes, took_s = wait(pids, case)
    print(json.dumps({"codes": codes, "took_s": took_s}))


def wait(pids: list[int], case: str) -> tuple[list[int], float]:
    """The exit codes, and how long those took that were not stopped, which are woken when all others have ended."""
    codes: dict[int, int] = {}
    happened, took_s = None, 0.0
    everyone = case.startswith("all")
    while len(codes) < COUNT:
        time.sleep(0.005)
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        here = [pid for pid in pids if pid not in codes]
        asleep = [pid for pid in here if is_stopped(pid)]
        if happened is None and len(asleep) == (COUNT if everyone else 1):
            happened = time.monotonic()
        if happened is not None and asleep == here:
            took_s = time.monotonic() - happened
            if not everyone or took_s > 1.5 * STALL_S:
                for pid in asleep:
                    os.kill(pid, signal.SIGCONT)
    return [codes[pid] for pid in pids], took_s


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
