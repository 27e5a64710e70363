"""Starting the ranks of a run on this machine, and waiting until all have ended.

The ranks themselves detect when one of them is gone or has stopped, and end with a message (``runs/processes/hub.py``). This
module adds what only a parent can: it knows by which signal a rank ended, and it kills a rank that has stopped. It loads
no framework, so that ranks start at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from shardwright.core.findings.errors import InputError, ShardwrightError
from shardwright.training.options import METRICS_FILE

POLL_S = 0.05
GRACE_S = 20
"""How long the other ranks have to end by themselves when one has failed. They learn of it at once, and are killed later."""
HOST = "127.0.0.1"
BEGINS = (
    # An interrupt that came while the interpreter started is held until here: there it would end with a traceback. From here on,
    # until a handler is installed, it ends a rank silently.
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT}); "
)
COMMAND = (
    "from shardwright.cli.main import main; from shardwright.cli.running.ranks import end_with_parent; end_with_parent(); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)
PARENT = "SHARDWRIGHT_PARENT"
PARENT_POLL_S = 1.0
PR_SET_PDEATHSIG = 1
"""Linux's option for the signal that a process gets when its parent ends."""
TAIL_BYTES = 2000


class RanksError(ShardwrightError):
    """A failure of ranks that the first rank could not report."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def launch(count: int, arguments: Sequence[str], out: Path) -> int:
    """Run ``shardwright`` with ``arguments`` as ``count`` ranks; the exit code of the first that failed, else 0.

    The first rank has this process's terminal, and reports the error of another one. SIGTERM and SIGINT are passed on: the
    ranks save and end, without a time limit. ``out``: the folder with the checkpoints of the run.

    Raises InputError where a rank cannot be started, RanksError where the first was killed before it reported anything, and
    KeyboardInterrupt where all were interrupted before they began.
    """
    assert not is_rank(os.environ), "a rank starts no ranks"
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        PARENT: str(os.getpid()),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(_free_port()),
        # Otherwise each rank would start as many threads as there are cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as ended:
        ended.callback(_kill, ranks)
        errors: list[IO[bytes] | None] = [None]
        errors += [ended.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        caught = ended.enter_context(_caught())
        for rank, stderr in enumerate(errors):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(_started(rank, count, arguments, environment, stderr))
        codes = _ended(ranks, caught)
        return _outcome(codes, set(caught.all), errors, resumes=(out / METRICS_FILE).exists())


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank that ``launch`` started and numbered."""
    return environment.get(PARENT) == str(os.getppid())


def _started(
    rank: int, count: int, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    # A child has the mask of the thread that starts it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            # Like the command itself, a rank imports nothing from its working directory.
            [sys.executable, "-P", "-c", BEGINS + COMMAND, *arguments],
            env=environment,
            stdout=None if stderr is None else subprocess.DEVNULL,
            stderr=stderr,
            # So a terminal's Ctrl-C reaches it only through this process, once.
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(
            f"rank {rank} of {count} could not be started: {error.strerror}. Nothing was trained. Give --mesh sizes of fewer "
            f"devices, or see the limits of processes and memory (ulimit -a)."
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the ranks that still run, with their child processes."""
    late = [process for process in ranks if process.poll() is None]
    for process in late:
        os.killpg(process.pid, signal.SIGKILL)
    for process in late:
        process.wait()


def end_with_parent() -> None:
    """End this rank when the command that started it is gone: otherwise it would go on writing.

    On Linux the kernel then also continues a rank that was stopped, so that it ends too.
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
        # In that time the others detect the same. A rank that missed this one first would report the wrong cause.
        time.sleep(2 * PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="shardwright parent", daemon=True).start()


class _Caught:
    """The signals that this process got. ``pending``: those not yet passed on to the ranks."""

    def __init__(self) -> None:
        self.all: list[int] = []
        self.pending: list[int] = []

    def add(self, number: int, _: FrameType | None) -> None:
        self.all.append(number)
        self.pending.append(number)


@contextmanager
def _caught() -> Iterator[_Caught]:
    """A context that collects signals for the ranks. Only the main thread can set signal handlers."""
    caught = _Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, caught.add) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(ranks: Sequence[subprocess.Popen[bytes]], caught: _Caught) -> list[int | None]:
    """The exit code of each rank, when all have ended. None for a rank that still runs ``GRACE_S`` after another failed.

    Ranks end by themselves and report why.
    """
    failed_at = None
    while any(process.poll() is None for process in ranks):
        while caught.pending:
            number = caught.pending.pop(0)
            for process in ranks:
                process.send_signal(number)
        if failed_at is None and any(process.poll() for process in ranks):
            failed_at = time.monotonic()
            for process in ranks:
                # A stopped rank continues, learns why the others are gone, and ends too.
                process.send_signal(signal.SIGCONT)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(POLL_S)
    return [process.poll() for process in ranks]


def _outcome(
    codes: Sequence[int | None], signals: set[int], errors: Sequence[IO[bytes] | None], *, resumes: bool
) -> int:
    """The exit code of the command. Reports first what the first rank did not report."""
    first = codes[0]
    # A signal that comes while a library is loaded may be lost on a rank, which then waits for the others.
    if signals and (first is None or -first in signals):
        if signal.SIGINT in signals:
            raise KeyboardInterrupt
        raise RanksError("SIGTERM ended the ranks before the run began. Start it again.", 128 + signal.SIGTERM)
    lines = []
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and -code not in signals:
            lines.append(f"rank {rank} of {len(codes)} was ended by {_name(-code)}. The others were ended too.")
        elif code and code > 0 and (first is None or first <= 0):
            tail = "".join(f"\n  {line}" for line in _tail(errors[rank]))
            lines.append(f"rank {rank} of {len(codes)} ended with exit code {code}. The others were ended too.{tail}")
    if lines:
        lines.append(
            "Go on with --resume, from the newest checkpoint." if resumes else "Nothing was trained: start it again."
        )
    if first is None or first < 0:
        raise RanksError("\n".join(lines))
    if lines:
        sys.stderr.write(f"shardwright: {' '.join(lines)}\n")
    return next((code for code in codes if code and code > 0), 1 if lines else 0)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _tail(file: IO[bytes] | None) -> list[str]:
    """The last lines of a rank's standard error."""
    if file is None:
        return []
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace").splitlines()[-10:]


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]
