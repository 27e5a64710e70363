"""``shardwright`` and ``torchrun`` for examples: each command is a fork of a process that has imported what it needs.

Documents start some sixty commands and ranks, which would import for one to four seconds each. A command has its own environment,
folder and files, and ends as any Python program does. ``make test-all`` runs the same examples with the commands themselves.

The folder of ``started`` goes first in PATH. What is there sends its arguments, its environment and its three files to a process that
forks, waits for the exit status, and ends with it.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PRELOADED = {
    "plain": [
        "shardwright.cli.running.train",
        "shardwright.report.checkpoint_view",
        "shardwright.report.plan.plan_view",
        "shardwright.report.run_progress",
        "shardwright.runs.run",
    ],
    "torch": [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "shardwright.engine_torch.training.run",
    ],
}
"""What a process imports before its first fork. JAX is in none: a command says how many devices it simulates before its import."""

NUM_FILES = 3
"""Standard input, output and error."""

COMMAND = """#!{python} -IS
import array, json, os, socket, sys
name, *arguments = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
torch = name == "torchrun" or any("torch" in word or "dcp" in word for word in arguments)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join({folder!r}, "torch" if torch else "plain"))
    server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    status = server.makefile().readline()
sys.exit(int(status) if status else "its process is gone")
"""
SERVER = "import sys; sys.path.insert(0, {root!r}); from tests.laws.forked import serve; serve({path!r}, {name!r})"


@contextmanager
def started(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Two such processes, and a folder of commands that are forks of them. ``environment``: that of a person who types commands."""
    root = str(Path(__file__).parents[2])
    for name in ("shardwright", "torchrun"):
        (folder / name).write_text(COMMAND.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for name in PRELOADED:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / name))
                listener.listen()
                program = SERVER.format(root=root, path=listener.fileno(), name=name)
                # Ranks of PyTorch share two cores.
                options = {**environment, **({"OMP_NUM_THREADS": "1"} if name == "torch" else {})}
                servers.append(
                    subprocess.Popen([sys.executable, "-c", program], env=options, pass_fds=[listener.fileno()])
                )
        yield folder
    finally:
        for server in servers:
            server.kill()
            server.wait()


def serve(file: int, name: str) -> None:
    """Fork for each connection, until this process is killed. Returns in the process of a command, when that has ended."""
    listener = socket.socket(fileno=file)
    imported = False
    while True:
        connection, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not imported:
            _import(name)
            imported = True
        if os.fork() == 0:
            listener.close()
            _run(connection)
            return
        connection.close()


def _import(name: str) -> None:
    for module in PRELOADED[name]:
        importlib.import_module(module)
    if name == "plain":
        from shardwright.data.batches import _grain

        _grain()
    gc.collect()
    gc.freeze()


def _run(connection: socket.socket) -> None:
    """Run what a connection asks for in a fork, which returns; this process reports its exit code."""
    _, found, _, _ = connection.recvmsg(1, socket.CMSG_LEN(NUM_FILES * array.array("i").itemsize))
    files = array.array("i")
    files.frombytes(found[0][2])
    with connection.makefile() as lines:
        arguments, folder, environment = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # Whether a file can seek, for one, is asked when it is opened. Libraries compare the name of its encoding.
        name = sys.stdout.encoding
        sys.stdin = open(0, encoding=name, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding=name, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding=name, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        _main(Path(arguments[0]).name)
        return
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        # The command was killed.
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if ended in ready:
        connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    os._exit(0)


def _main(name: str) -> None:
    if name == "torchrun":
        from tests.laws.torchrun import main
    else:
        from shardwright.cli.main import main
    sys.exit(main())
