"""Joining the other processes of a run, before a framework looks for devices, and leaving them at the end."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.core.findings.errors import InputError, exit_code_of
from shardwright.runs.processes.channel import Channel, watched
from shardwright.runs.processes.group import Alone, Group, Several
from shardwright.runs.processes.hub import Hub
from shardwright.training.cluster import Processes
from shardwright.training.options import Listener

GREETING_TIMEOUT_S = 10
RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How a framework connects processes that have joined, and disconnects them when all are done.

    ``connect`` may listen at the coordinator's port, which is free again; it raises InputError where it cannot connect.
    ``lost``: the exceptions of an operation whose cause may be a lost process; the run then waits for news of that.
    """

    connect: Callable[[Processes], None]
    disconnect: Callable[[], None]
    lost: tuple[type[BaseException], ...] = ()


@contextmanager
def joined(
    processes: Processes | None, connection: Connection, shown: Listener, refused: str | None = None
) -> Iterator[Group]:
    """A context with the processes of this run joined and connected. ``processes`` None: this one alone.

    ``refused``: why the run may not begin, if process 0 knows a reason; all processes then end with it. An exception in
    the block ends the others too, with its message. Raises InputError where not all processes join in time.
    """
    if processes is None:
        yield Alone()
        return
    try:
        group = rendezvous(processes, shown)
    except InputError as error:
        raise InputError(refused) if refused is not None else error from None
    try:
        _refuse(group, refused)
        connection.connect(processes)
        yield group
        group.exchange("the end of the run", None)
        connection.disconnect()
    except BaseException as error:
        if isinstance(error, connection.lost):
            group.await_cause()
        group.fail(error)
        # At exit a framework may wait for the other processes, which are ending too: JAX waits for more than a minute.
        atexit.register(_end_now, exit_code_of(error))
        raise
    group.leave()


def _refuse(group: Group, refused: str | None) -> None:
    """Raises InputError in all processes if the first was refused."""
    first, *_ = group.exchange("whether the run may begin", refused if group.index == 0 else None)
    if first.value is not None:
        raise InputError(first.value)


def _end_now(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def rendezvous(processes: Processes, shown: Listener) -> Several:
    """The group of this process, once all have joined. A framework's own wait does not report who is missing; JAX's aborts.

    ``shown`` gets the reason, if this process ends because of another one.
    """
    if processes.index != 0:
        return Several(
            processes.index, processes.count, _reach_first(processes), None, shown, processes.stall_timeout_s
        )
    connections = _gather(processes)
    ours, hubs = socket.socketpair()
    channels = {0: Channel(hubs), **{index: channel for index, (channel, _) in connections.items()}}
    hosts = {0: socket.gethostname(), **{index: host for index, (_, host) in connections.items()}}
    hub = Hub(channels, hosts, processes.stall_timeout_s)
    return Several(0, processes.count, Channel(ours), hub, shown, processes.stall_timeout_s)


def _gather(processes: Processes) -> dict[int, tuple[Channel, str]]:
    """The channels to all other processes, and their hosts. All are welcomed when the last has joined."""
    deadline = time.monotonic() + processes.join_timeout_s
    came: dict[int, tuple[Channel, str]] = {}
    with _listening(processes) as listener:
        while len(came) < processes.count - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                raise _refusal([channel for channel, _ in came.values()], _missing(processes, came)) from None
            channel = Channel(watched(connection))
            greeting = channel.first(GREETING_TIMEOUT_S)
            if greeting is None or not isinstance(index := greeting.get("process"), int):
                channel.close()
                continue
            host = f"{greeting.get('host')}, {address[0].removeprefix('::ffff:')}"
            if index in came and came[index][0].is_broken():
                came.pop(index)[0].close()
            wrong = None
            if greeting.get("count") != processes.count:
                wrong = f"process {index} ({host}) expects {greeting.get('count')} processes, process 0 expects {processes.count}"
            elif not 0 < index < processes.count or index in came:
                wrong = f"two processes have the index {index}; one is on {host}"
            if wrong is not None:
                advice = "Give each an index of its own (--process), and all the same --processes."
                raise _refusal([channel, *(other for other, _ in came.values())], f"{wrong}. {advice}")
            came[index] = (channel, host)
    # Only after the listener is closed: the framework listens at the same port next.
    for channel, _ in came.values():
        channel.send({"welcome": True})
    return came


def _missing(processes: Processes, came: Container[int]) -> str:
    missing = [str(index) for index in range(1, processes.count) if index not in came]
    shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    return (
        f"process 0 waited {processes.join_timeout_s} s at {processes.coordinator} for {processes.count - 1} others "
        f"({processes.found}), and not all came. Missing: process {shown}. See why they did not start, or give them longer "
        f"with --join-timeout."
    )


def _refusal(channels: Iterable[Channel], why: str) -> InputError:
    """The error of process 0, which is also sent to those that have joined."""
    for channel in channels:
        channel.send({"refused": why})
        channel.close()
    return InputError(why)


def _listening(processes: Processes) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", processes.port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=min(processes.count, 4096),
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen at port {processes.port} ({processes.found}): "
            f"{os.strerror(error.errno or 0)}. Give --coordinator another port, the same to all processes."
        ) from None


def _reach_first(processes: Processes) -> Channel:
    """The channel to process 0. Tries until process 0 answers, which it does when all have joined or its timeout is over."""
    deadline = time.monotonic() + processes.join_timeout_s
    greeting = {"process": processes.index, "count": processes.count, "host": socket.gethostname()}
    problem: object = "nobody answered"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((processes.host, processes.port), timeout=GREETING_TIMEOUT_S)
        except OSError as error:
            problem = error.strerror or error
        else:
            channel = Channel(watched(connection))
            channel.send(greeting)
            answer = channel.first(processes.join_timeout_s + GREETING_TIMEOUT_S)
            if answer is not None and "welcome" in answer:
                return channel
            channel.close()
            if answer is not None and "refused" in answer:
                raise InputError(answer["refused"])
            problem = "it closed the connection"
        time.sleep(RETRY_S)
    raise InputError(
        f"process {processes.index} of {processes.count} did not reach process 0 at {processes.coordinator} within "
        f"{processes.join_timeout_s} s ({processes.found}): {problem}. See that process 0 runs there, that the host and the "
        f"port are right and open to this one; or give it longer with --join-timeout."
    )
