"""PyTorch's part in a run of several processes: one rank each, connected once they have met.

Under torchrun the ranks know of a store, at whose port they cannot meet: the first says there where it waits for them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

# Documented, and not in torch's own list of what it exports.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardwright.core.findings.errors import InputError
from shardwright.runs.processes.meeting import Connection
from shardwright.training.cluster import TORCHRUN, Processes

MEETING = "shardwright/meeting"
RETRY_S = 0.2
COLLECTIVE_TIMEOUT_S = 1800
"""PyTorch's own, after which it aborts; longer by ours, which says who has stopped and ends the others."""
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def device_of(index: int, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of a rank: the GPU of its number on this host, where there are GPUs; ``index``: of the rank among all."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = next((int(environment[name]) for name in LOCAL_RANK if name in environment), index)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connection_of(processes: Processes | None) -> tuple[Processes | None, Connection]:
    """Where the processes meet, and how PyTorch connects them. Under torchrun its store is asked, or made, first."""
    if processes is None or processes.launcher != TORCHRUN:
        return processes, Connection(connect=_connect, disconnect=_disconnect, lost=(RuntimeError,))
    store = _torchrun_store(processes)
    if processes.index == 0:
        store.set(MEETING, f"{processes.host}:{_free_port()}")
    meeting = store.get(MEETING).decode()

    def connect(processes: Processes) -> None:
        _begin(processes, PrefixStore("shardwright/ranks", store))

    connection = Connection(connect=connect, disconnect=_disconnect, lost=(RuntimeError,))
    return replace(processes, coordinator=meeting), connection


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process by itself, as a mesh wants one."""
    _begin(Processes(count=1, index=0, coordinator="", found="alone"), HashStore())
    try:
        yield
    finally:
        _disconnect()


def _connect(processes: Processes) -> None:
    _begin(processes, _store(processes, is_first=processes.index == 0))


def _torchrun_store(processes: Processes) -> Store:
    # The agent keeps it, unless a person set the variables by hand.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    return _store(processes, is_first=processes.index == 0 and not agent)


def _store(processes: Processes, *, is_first: bool) -> Store:
    """The store at the coordinator's port, made by the first and reached by the others, in the time there is to join.

    Whether somebody listens there is asked first, and PyTorch then waited for in a thread: it waits as long as it likes for
    an answer, and tells of a failure in its own log.
    """
    timeout = processes.join_timeout_s
    if is_first:
        _require_free(processes)
    else:
        _await_listener(processes)

    def made() -> Store:
        return TCPStore(
            processes.host,
            processes.port,
            processes.count,
            is_master=is_first,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )

    done: list[Store | BaseException] = []

    def make() -> None:
        try:
            done.append(made())
        except (dist.DistError, RuntimeError, ValueError) as error:
            done.append(error)

    thread = threading.Thread(target=make, name="shardwright store", daemon=True)
    thread.start()
    thread.join(timeout)
    if done and isinstance(done[0], Store):
        return done[0]
    said = (
        str(done[0]).strip().splitlines()[0] if done and str(done[0]).strip() else "what listens there does not answer"
    )
    raise _no_store(processes, said)


def _require_free(processes: Processes) -> None:
    try:
        with socket.create_server(("", processes.port)):
            pass
    except OSError as error:
        raise _no_store(processes, os.strerror(error.errno or 0)) from None


def _await_listener(processes: Processes) -> None:
    deadline, problem = time.monotonic() + processes.join_timeout_s, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((processes.host, processes.port), timeout=RETRY_S + 1):
                return
        except OSError as error:
            problem = str(error.strerror or error)
        time.sleep(RETRY_S)
    raise _no_store(processes, problem)


def _no_store(processes: Processes, said: str) -> InputError:
    return InputError(
        f"process {processes.index} of {processes.count} has no store at {processes.coordinator} ({processes.found}): "
        f"{said}. See that process 0 runs, that the host and the port are right and the port is free there for PyTorch alone; "
        f"or give them longer than {processes.join_timeout_s} s with --join-timeout."
    )


def _begin(processes: Processes, store: Store) -> None:
    device = device_of(processes.index)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S + processes.stall_timeout_s)
    dist.init_process_group(backend, store=store, rank=processes.index, world_size=processes.count, timeout=timeout)


def _disconnect() -> None:
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
