"""One process of a test: `python -m tests.engine_jax.member FOLDER train ...`, which records what it reads.

FOLDER/read-I gets the index of every row of the corpus that process I reads. With SIGNAL="STEP PROCESS NAME" in the
environment, that process sends itself the signal when that step is done. With LATE=SECONDS, each process hears the end of another
so much later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shardwright.cli.main import main
from shardwright.data import Rows


def run(folder: Path, arguments: list[str]) -> int:
    index = arguments[arguments.index("--process") + 1] if "--process" in arguments else os.environ["SLURM_PROCID"]
    log = (folder / f"read-{index}").open("a", buffering=1)
    read = Rows.__getitem__

    def counted(self: Rows, row: int):
        log.write(f"{row}\n")
        return read(self, row)

    Rows.__getitem__ = counted
    if "SIGNAL" in os.environ:
        at, process, name = os.environ["SIGNAL"].split()
        if process == index:
            send(signal.Signals[name], int(at))
    if "LATE" in os.environ:
        hear_late(float(os.environ["LATE"]))
    return main(arguments)


def hear_late(seconds: float) -> None:
    from shardwright.runs.processes.group import Several

    end = Several._end

    def late(self: Several, *rest) -> None:
        time.sleep(seconds)
        end(self, *rest)

    Several._end = late


def send(number: signal.Signals, at: int) -> None:
    from shardwright.runs.loop import Loop

    record = Loop._record

    def recorded(self: Loop, step: int, *rest) -> None:
        record(self, step, *rest)
        if step == at:
            os.kill(os.getpid(), number)

    Loop._record = recorded


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
