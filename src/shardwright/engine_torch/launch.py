"""Starting the ranks of a run on this machine, by the library behind torchrun, and waiting until all have ended.

The ranks themselves notice when one of them is gone, and end with a message (``runs/hub.py``). What is added here is what
only a parent knows: by which signal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext

POLL_S = 0.2
HOST = "127.0.0.1"
COMMAND = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``shardwright`` with ``arguments`` as ``count`` ranks; the exit code of the first that failed, else 0.

    The first rank has this process's terminal; what the others write is kept aside and shown where one of them was killed
    before it could tell. SIGTERM and SIGINT are passed on: the ranks save and end, in their own time.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(_free_port()),
        # As many ranks as there are cores would each start as many threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    with tempfile.TemporaryDirectory(prefix="shardwright-ranks-") as logs:
        context = start_processes(
            name="shardwright",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(count), ("-c", COMMAND, *arguments)),
            envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
            logs_specs=DefaultLogsSpecs(
                log_dir=logs, redirects={rank: Std.NONE if rank == 0 else Std.ALL for rank in range(count)}
            ),
        )
        with _passing_on(context):
            while (result := context.wait(timeout=POLL_S, period=POLL_S)) is None:
                pass
        failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return _told(failures, count)


def _told(failures: dict[int, int], count: int) -> int:
    """Say which ranks were killed; those that the parent itself ended, for another's failure, are not among them."""
    killed = {rank: -code for rank, code in failures.items() if code < 0 and -code != signal.SIGTERM}
    for rank, number in sorted(killed.items()):
        sys.stderr.write(
            f"shardwright: rank {rank} of {count} was ended by {signal.Signals(number).name}. The others were ended too. "
            f"Go on with --resume, from the newest checkpoint.\n"
        )
    if killed:
        return 1
    codes = [failures[rank] for rank in sorted(failures) if failures[rank] > 0]
    return codes[0] if codes else (1 if failures else 0)


@contextmanager
def _passing_on(context: PContext) -> Iterator[None]:
    """Signals go to the ranks while they run. Only the main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        for pid in context.pids().values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]
