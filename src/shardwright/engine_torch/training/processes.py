"""How PyTorch connects the processes of a run, one rank each, once each has found the others.

Under torchrun the ranks have a store, but cannot use its port to find each other: rank 0 writes the address at which it waits to
the store.
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
from shardwright.runs.processes.rendezvous import Connection
from shardwright.training.cluster import TORCHRUN, Processes

MEETING = "shardwright/meeting"
RETRY_S = 0.2
COLLECTIVE_TIMEOUT_S = 1800
"""PyTorch's own timeout, after which it aborts. Ours is added to it, so that ours ends first: it reports which process has stopped,
and ends the others."""
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def device_of(index: int, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of a rank: the GPU with its local rank, or the CPU of a host without GPUs; ``index``: the rank among all."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = next((int(environment[name]) for name in LOCAL_RANK if name in environment), index)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connection_of(processes: Processes | None) -> tuple[Processes | None, Connection]:
    """The address of the coordinator, and how PyTorch connects the processes. Under torchrun its store is read, or made, first."""
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
    """A process group of this process only, since a mesh needs one."""
    _begin(Processes(count=1, index=0, coordinator="", found="alone"), HashStore())
    try:
        yield
    finally:
        _disconnect()


def _connect(processes: Processes) -> None:
    _begin(processes, _store(processes, is_first=processes.index == 0))


def _torchrun_store(processes: Processes) -> Store:
    # torchrun's agent has made it, unless a user has set the variables by hand.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    return _store(processes, is_first=processes.index == 0 and not agent)


def _store(processes: Processes, *, is_first: bool) -> Store:
    """The store at the coordinator's port. Process 0 makes it, the others connect to it, within the time allowed to join.

    The port is tested first, and PyTorch then runs in a thread, because it waits for an answer without a limit and
    reports a failure in its own log only.
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
    reason = (
        str(done[0]).strip().splitlines()[0] if done and str(done[0]).strip() else "what listens there does not answer"
    )
    raise _no_store(processes, reason)


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


def _no_store(processes: Processes, reason: str) -> InputError:
    return InputError(
        f"process {processes.index} of {processes.count} has no store at {processes.coordinator} ({processes.found}): "
        f"{reason}. Check that process 0 runs, that the host and the port are right, and that nothing else uses the port there; "
        f"or allow more than {processes.join_timeout_s} s with --join-timeout."
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
