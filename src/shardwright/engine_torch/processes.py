"""PyTorch's part in a run of several processes: one rank each, connected once they have met.

Under torchrun the ranks know of a store, at whose port they cannot meet: the first says there where it waits for them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

# Documented, and not in torch's own list of what it exports.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardwright.core.errors import InputError
from shardwright.core.processes import TORCHRUN, Processes
from shardwright.runs.meeting import Connection

MEETING = "shardwright/meeting"
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
    timeout = timedelta(seconds=processes.join_timeout_s)
    try:
        return TCPStore(
            processes.host, processes.port, processes.count, is_master=is_first, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"process {processes.index} of {processes.count} has no store at {processes.coordinator} "
            f"({processes.found}): {said}"
        ) from None


def _begin(processes: Processes, store: Store) -> None:
    device = device_of(processes.index)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=processes.index, world_size=processes.count)


def _disconnect() -> None:
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
