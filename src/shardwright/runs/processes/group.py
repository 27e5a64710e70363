"""The group of processes of a run, from the view of one of them. A single process is a group of one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from shardwright.core.findings.errors import InputError, ShardwrightError, exit_code_of
from shardwright.runs.processes.channel import Channel, Message
from shardwright.runs.processes.hub import GONE, Hub
from shardwright.runs.processes.pace import Pace, Watch, stall_message
from shardwright.training.cluster import STALL_TIMEOUT_S
from shardwright.training.options import Listener

EXCHANGE_TIMEOUT_S = 1800
"""Long enough for a checkpoint to be written, or a text to be read."""

GRACE_S = 3
"""How long a process that learns of another's error waits to end with its own: some errors occur in all processes."""

FAREWELL_S = 6
"""How long process 0 stays after a failure, so that all learn of it; and how long an error waits for its cause."""


class ExchangedValue(NamedTuple):
    """One of the different values of an exchange, and the first process that gave it."""

    value: Any
    process: int


class Ending(NamedTuple):
    """The step after which a run ends. ``why``: the signal that ended it early; None at its regular end."""

    last: int
    why: str | None = None


class Exchanging(Protocol):
    """Processes that exchange values, from the view of one of them."""

    @property
    def index(self) -> int:
        """The index of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[ExchangedValue]:
        """Wait until all processes have given a value; returns the different values, ordered by process.

        ``name`` identifies the exchange, and is used once per run. ``value``: any JSON value. Where a process does not give
        one in time, all end with a message that names it.
        """
        ...


class Group(Exchanging, Protocol):
    """The processes of a run, from the view of one of them."""

    def stop_after(self, number: int, last: int, signal_name: str | None) -> Ending:
        """Where the run ends, the same in all processes. Called after step ``number`` of a run to step ``last``.

        ``signal_name``: the signal that this process got, if any.
        """
        ...

    def stepping(self, number: int) -> AbstractContextManager[None]:
        """A context in which step ``number`` is under way. Heartbeats report it to the others."""
        ...


class Alone:
    """A run of one process."""

    index = 0
    count = 1

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[ExchangedValue]:
        del name, timeout_s
        return [ExchangedValue(value, 0)]

    def stop_after(self, number: int, last: int, signal_name: str | None) -> Ending:
        return Ending(last) if signal_name is None else Ending(number, signal_name)

    def stepping(self, number: int) -> AbstractContextManager[None]:
        del number
        return nullcontext()


class Several:
    """One of several processes. A thread listens to the hub, and ends this process when another one is gone or has stopped.

    The main thread cannot do that: it may wait for ever in a collective. A second thread sends the hub heartbeats with the
    progress of this process, and detects when process 0, which has the hub, has stopped.
    """

    def __init__(
        self,
        index: int,
        count: int,
        channel: Channel,
        hub: Hub | None,
        shown: Listener,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self.index, self.count, self._shown = index, count, shown
        self._channel, self._hub = channel, hub
        self._changed = threading.Condition()
        self._exchanged: dict[str, Sequence[ExchangedValue]] = {}
        self._begun = 0
        self._frozen = False
        self._ending: Ending | None = None
        self._leaving = threading.Event()
        self._pace, self._stall_timeout_s = Pace(), stall_timeout_s
        self._watch = Watch(() if hub is not None else (0,), stall_timeout_s)
        threading.Thread(target=self._send_pace, name="shardwright pace", daemon=True).start()
        self._listener = threading.Thread(target=self._listen, name="shardwright group", daemon=True)
        self._listener.start()

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[ExchangedValue]:
        self._channel.send({"exchange": name, "value": value, "timeout_s": timeout_s})
        with self._changed:
            self._changed.wait_for(lambda: name in self._exchanged)
            return self._exchanged.pop(name)

    def stop_after(self, number: int, last: int, signal_name: str | None) -> Ending:
        """No message is sent until a process gets a signal. Then each process reports the step that it has begun and
        begins no other. All end after the last step that any has begun.
        """
        with self._changed:
            if signal_name is not None and not self._frozen:
                self._frozen = True
                self._channel.send({"stop": signal_name})
            if self._frozen:
                self._changed.wait_for(lambda: self._ending is not None)
                assert self._ending is not None
                # A process in its first step has reported none: if all are, the run ends after that one.
                return Ending(min(max(self._ending.last, number), last), self._ending.why)
            self._begun = min(number + 1, last)
            return Ending(last)

    def stepping(self, number: int) -> AbstractContextManager[None]:
        return self._pace.stepping(number)

    def fail(self, error: BaseException) -> None:
        """Tell all others that this process ends with an error. Process 0 stays until they have received it."""
        message = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
        self._leaving.set()
        self._channel.send({"failed": message, "exit_code": exit_code_of(error)})
        # Other processes keep their channels open until they end. JAX aborts them if process 0 ends first.
        self._await_others()

    def leave(self) -> None:
        """Leave the group when every process is done."""
        self._leaving.set()
        self._channel.send({"bye": True})
        if self._hub is None:
            self._channel.close()
        self._await_others()

    def await_cause(self) -> None:
        """Wait for news of a lost process, when an error here may only be its consequence.

        A process that has stopped does not close its channel, so the hub asks all whether they are there.
        """
        # The hub may not know the progress of this process yet, and its message names the last step.
        self._channel.send({"beat": self._pace.beat})
        self._channel.send({"lost": True})
        self._listener.join(FAREWELL_S)

    def _send_pace(self) -> None:
        while not self._leaving.wait(self._watch.tick_s):
            beat = self._pace.beat
            self._channel.send({"beat": beat})
            self._watch.heard(self.index, beat)
            if self._hub is None and (stall := self._watch.tick()) is not None and stall.members:
                message = stall_message(stall, {0: f"process 0 of {self.count}"}, self.count, self._stall_timeout_s)
                # If process 0 wakes up, it then reads why all others are gone.
                self._channel.send({"failed": message, "exit_code": 1})
                self._end(message, 1, 0)
                return

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._watch.heard(0)
            if "ask" in message:
                self._channel.send({"here": True})
            elif "gone" in message:
                self._end(message["gone"], message["exit_code"], GRACE_S if message["failed"] else 0)
                return
            with self._changed:
                self._handle(message)
                self._changed.notify_all()
        self._end(f"process 0 of {self.count} {GONE}", 1, 0)

    def _handle(self, message: Message) -> None:
        if "exchanged" in message:
            self._exchanged[message["exchanged"]] = [ExchangedValue(*value) for value in message["values"]]
        elif "freeze" in message:
            self._frozen = True
            self._channel.send({"begun": self._begun})
        elif "stop_after" in message:
            self._ending = Ending(message["stop_after"], message["why"])

    def _end(self, why: str, exit_code: int, grace_s: float) -> None:
        """End this process, unless it ends by itself: at any regular exit a framework would wait for the others."""
        if self._leaving.wait(grace_s):
            return
        self._shown.end(f"process {self.index} of {self.count}: {why}", exit_code)
        _silence()
        self._await_others()
        os._exit(exit_code)

    def _await_others(self) -> None:
        if self._hub is not None:
            self._channel.close()
            self._hub.join(FAREWELL_S)


def _silence() -> None:
    """Discard what threads of a framework still write to standard error: it is a consequence, and would follow the cause."""
    sys.stderr.flush()
    with open(os.devnull, "wb") as nowhere, suppress(OSError):
        os.dup2(nowhere.fileno(), 2)


def must_agree(group: Group, values: dict[str, Any], what: str) -> None:
    """Raises InputError in every process if the values of one differ from those of process 0. ``values``: by name."""
    different = group.exchange(what, values)
    first = different[0].value
    lines = [
        f"  {name}: {first.get(name)!r} in process 0, {other.value.get(name)!r} in process {other.process}"
        for other in different[1:]
        for name in dict.fromkeys([*first, *other.value])
        if first.get(name) != other.value.get(name)
    ]
    if lines:
        raise InputError(
            f"{what}: the {group.count} processes of this run do not agree:\n"
            + "\n".join(lines[:20])
            + "\nGive all of them the same command, text and files. Nothing was started."
        )
