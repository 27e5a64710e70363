"""torchrun for examples: the ranks of one machine, each a fork of this process, which has imported PyTorch (``forked.py``).

What a rank sees of torchrun is the same: its variables of the environment and a port for its store.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun")
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = [_started(rank, options.nproc_per_node, port, options) for rank in range(options.nproc_per_node)]
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    sys.exit(failed)


def _started(rank: int, count: int, port: int, options: argparse.Namespace) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    code = 1
    try:
        code = _run(options.script, options.arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(script: str, arguments: Sequence[str]) -> int:
    """The exit code of a script. ``os._exit`` runs no exit handlers, so that the script's errors are printed here."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
