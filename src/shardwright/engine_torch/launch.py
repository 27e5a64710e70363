"""Starting the ranks of a run on this machine, by the library behind torchrun, and waiting until all have ended.

The ranks themselves notice when one of them is gone or has stopped, and end with a message (``runs/hub.py``). What is added
here is what only a parent knows and can: by which signal, and that one that has stopped does not stay.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

POLL_S = 0.05
GRACE_S = 20
"""So long the other ranks have to end by themselves, when one has failed. They hear of it at once, and are then killed."""
HOST = "127.0.0.1"
COMMAND = (
    "import sys; from shardwright.engine_torch.launch import end_with_parent; end_with_parent(); "
    "from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
PARENT = "SHARDWRIGHT_PARENT"
PARENT_POLL_S = 1.0
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``shardwright`` with ``arguments`` as ``count`` ranks; the exit code of the first that failed, else 0.

    The first rank has this process's terminal, and tells what another one failed with. SIGTERM and SIGINT are passed on: the ranks save and end, in their own time.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        PARENT: str(os.getpid()),
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
        assert isinstance(context, SubprocessContext)
        with _passing_on(context):
            codes = _ended(context)
        context.close(signal.SIGKILL)
    return _told(codes)


def end_with_parent() -> None:
    """End this rank when the command that started it is gone: nobody else would, and it would go on writing.

    Where the system can, it wakes a rank then that was stopped, so that it ends too.
    """
    parent = int(os.environ[PARENT])
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        with suppress(OSError):
            sys.stderr.write("shardwright: the command that started the ranks is gone, so they end too.\n")
            sys.stderr.flush()
        # The others notice in that time: a rank that missed this one would say that it is gone, and not why.
        time.sleep(2 * PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="shardwright parent", daemon=True).start()


def _ended(context: SubprocessContext) -> dict[int, int | None]:
    """The exit code of each rank, when all have ended; None of those that did not, though another one failed.

    The library's own waiting ends all as soon as one has failed. They end by themselves, and say why: only what has not
    after ``GRACE_S`` is left to it.
    """
    ranks = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    failed_at = None
    while any(process.poll() is None for process in ranks.values()):
        if failed_at is None and any(process.poll() for process in ranks.values()):
            failed_at = time.monotonic()
            for process in ranks.values():
                # One that was stopped hears why the others are gone, and ends as they do.
                process.send_signal(signal.SIGCONT)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(POLL_S)
    return {rank: process.poll() for rank, process in ranks.items()}


def _told(codes: dict[int, int | None]) -> int:
    """Say which ranks were killed; the exit code that stands for all."""
    killed = {rank: -code for rank, code in codes.items() if code is not None and code < 0}
    for rank, number in killed.items():
        sys.stderr.write(
            f"shardwright: rank {rank} of {len(codes)} was ended by {signal.Signals(number).name}. The others were ended "
            f"too. Go on with --resume, from the newest checkpoint.\n"
        )
    if killed or None in codes.values():
        return 1
    return next((code for code in codes.values() if code), 0)


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
