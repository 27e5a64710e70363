"""`shardwright train` as a user starts it, with one core for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.typed import once

KILLED_WITHIN_S = 30
ENTRY = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", ENTRY, *once(["train", *arguments])]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}


def run(arguments: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(arguments), env=environment(more), capture_output=True, text=True, timeout=300, check=False
    )


KILLS = """
import os
import signal

if os.environ.get("RANK") == os.environ["KILLED_RANK"]:
    from shardwright.checkpoint.reading import streams

    def open_regular(path):
        with open(os.environ["KILLED_MARK"], "w") as file:
            file.write(str(path))
        os.kill(os.getpid(), signal.SIGKILL)

    streams.open_regular = open_regular
"""
"""What Python runs when it starts: one rank is killed when it opens the first file of elements."""


def killed_in_load(arguments: Sequence[str], rank: int, folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """A run in which a rank is killed while all load; and the file that it was about to read, empty if it read none.

    ``folder``: an empty one. The run has ``2 * KILLED_WITHIN_S`` to start and to end.
    """
    mark = folder / "mark"
    mark.touch()
    (folder / "sitecustomize.py").write_text(KILLS)
    more = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "KILLED_RANK": str(rank), "KILLED_MARK": str(mark)}
    done = subprocess.run(
        command(arguments),
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=2 * KILLED_WITHIN_S,
        check=False,
    )
    return done, mark.read_text()


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A run in progress; it is killed at the end of the block if it has not ended."""
    process = subprocess.Popen(
        command(arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def pid_of_rank(process: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank: a child with this RANK in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(parent) == process.pid and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no rank {rank} among the children of {process.pid}")


def flip(directory: Path) -> None:
    """Flip one bit of the elements of a checkpoint."""
    path = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 16
    path.write_bytes(data)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something has happened, while a run is in progress."""
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
