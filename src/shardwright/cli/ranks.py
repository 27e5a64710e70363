"""Starting the ranks of a run on this machine, and waiting until all have ended.

The ranks themselves notice when one of them is gone or has stopped, and end with a message (``runs/hub.py``). What is added
here is what only a parent knows and can: by which signal, and that one that has stopped does not stay. It loads no
framework, so that ranks start at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

POLL_S = 0.05
GRACE_S = 20
"""So long the other ranks have to end by themselves, when one has failed. They hear of it at once, and are then killed."""
HOST = "127.0.0.1"
COMMAND = (
    "import sys; from shardwright.cli.ranks import end_with_parent; end_with_parent(); "
    "from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
PARENT = "SHARDWRIGHT_PARENT"
PARENT_POLL_S = 1.0
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``shardwright`` with ``arguments`` as ``count`` ranks; the exit code of the first that failed, else 0.

    The first rank has this process's terminal, and tells what another one failed with. SIGTERM and SIGINT are passed on:
    the ranks save and end, in their own time.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        PARENT: str(os.getpid()),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(_free_port()),
        # As many ranks as there are cores would each start as many threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _passing_on(ranks):
            for rank in range(count):
                # Each in a session of its own: a terminal's Ctrl-C reaches it from here, once.
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-c", COMMAND, *arguments],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=None if rank == 0 else subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            codes = _ended(ranks)
    finally:
        late = [process for process in ranks if process.poll() is None]
        for process in late:
            # With what it has started.
            os.killpg(process.pid, signal.SIGKILL)
        for process in late:
            process.wait()
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


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit code of each rank, when all have ended; None of those that did not, though another one failed.

    They end by themselves, and say why: what has not after ``GRACE_S`` is not waited for.
    """
    failed_at = None
    while any(process.poll() is None for process in ranks):
        if failed_at is None and any(process.poll() for process in ranks):
            failed_at = time.monotonic()
            for process in ranks:
                # One that was stopped hears why the others are gone, and ends as they do.
                process.send_signal(signal.SIGCONT)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(POLL_S)
    return [process.poll() for process in ranks]


def _told(codes: Sequence[int | None]) -> int:
    """Say which ranks were killed; the exit code that stands for all."""
    killed = {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}
    for rank, number in killed.items():
        sys.stderr.write(
            f"shardwright: rank {rank} of {len(codes)} was ended by {signal.Signals(number).name}. The others were ended "
            f"too. Go on with --resume, from the newest checkpoint.\n"
        )
    if killed or None in codes:
        return 1
    return next((code for code in codes if code), 0)


@contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Signals go to the ranks while they run. Only the main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]
