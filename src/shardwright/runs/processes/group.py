"""What the processes of a run ask of each other: one of several, or one by itself with the same answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from shardwright.core.findings.errors import InputError, ShardwrightError, exit_code_of
from shardwright.runs.processes.channel import Channel, Message
from shardwright.runs.processes.hub import GONE, Hub
from shardwright.runs.processes.pace import Pace, Watch, stall_message
from shardwright.training.cluster import STALL_TIMEOUT_S
from shardwright.training.options import Listener

EXCHANGE_TIMEOUT_S = 1800
"""For what takes as long as a checkpoint takes to write, or a text to read."""

GRACE_S = 3
"""A process that hears of another's error has so long to end with its own, where what failed failed for all."""

FAREWELL_S = 6
"""Process 0 stays so long after a failure, so that all hear of it; and so long an error waits for its cause."""


class Held(NamedTuple):
    """A value that came of an exchange, and the first process that gave it."""

    value: Any
    process: int


class Ending(NamedTuple):
    """The step after which a run ends, and why, where it was asked to."""

    last: int
    why: str | None = None


class Group(Protocol):
    """The processes of a run, seen by one of them."""

    @property
    def index(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[Held]:
        """The different values that all processes give, by process, once all have. ``name`` says what for, once a run.

        ``value``: anything of JSON. Where one does not come in time, all end with a message that names it.
        """
        ...

    def stop_after(self, number: int, last: int, asked: str | None) -> Ending:
        """Where the run ends, asked after step ``number``, of a run to ``last``: all processes get one answer.

        ``asked``: the signal by which this process was asked to end.
        """
        ...

    def stepping(self, number: int) -> AbstractContextManager[None]:
        """Step ``number`` is under way while the block lasts, so that the others know how far this process is."""
        ...


class Alone:
    """A run of one process."""

    index = 0
    count = 1

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[Held]:
        del name, timeout_s
        return [Held(value, 0)]

    def stop_after(self, number: int, last: int, asked: str | None) -> Ending:
        return Ending(last) if asked is None else Ending(number, asked)

    def stepping(self, number: int) -> AbstractContextManager[None]:
        del number
        return nullcontext()


class Several:
    """One of several processes. A thread hears the hub, and ends this process when another one is gone or has stopped.

    The main thread cannot do that: it waits in a collective for what will never come. A second thread tells the hub how far
    this process is, and notices where the first process, with the hub, has stopped itself.
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
        self._exchanged: dict[str, Sequence[Held]] = {}
        self._begun = 0
        self._frozen = False
        self._ending: Ending | None = None
        self._leaving = threading.Event()
        self._pace, self._stall_timeout_s = Pace(), stall_timeout_s
        self._watch = Watch(() if hub is not None else (0,), stall_timeout_s)
        threading.Thread(target=self._tell_pace, name="shardwright pace", daemon=True).start()
        self._listener = threading.Thread(target=self._listen, name="shardwright group", daemon=True)
        self._listener.start()

    def exchange(self, name: str, value: Any, timeout_s: float = EXCHANGE_TIMEOUT_S) -> Sequence[Held]:
        self._channel.send({"exchange": name, "value": value, "timeout_s": timeout_s})
        with self._changed:
            self._changed.wait_for(lambda: name in self._exchanged)
            return self._exchanged.pop(name)

    def stop_after(self, number: int, last: int, asked: str | None) -> Ending:
        """No message is sent until a process is asked to end. Then each says which step it has begun and begins no
        other, and the last one that any has begun is where all end.
        """
        with self._changed:
            if asked is not None and not self._frozen:
                self._frozen = True
                self._channel.send({"stop": asked})
            if self._frozen:
                self._changed.wait_for(lambda: self._ending is not None)
                assert self._ending is not None
                return Ending(min(self._ending.last, last), self._ending.why)
            self._begun = min(number + 1, last)
            return Ending(last)

    def stepping(self, number: int) -> AbstractContextManager[None]:
        return self._pace.stepping(number)

    def fail(self, error: BaseException) -> None:
        """Tell all others that this process ends with an error; process 0 stays until they have heard."""
        said = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
        self._leaving.set()
        self._channel.send({"failed": said, "exit_code": exit_code_of(error)})
        # Another process's channel stays open until its end: JAX, for one, aborts it if process 0 ends first.
        self._await_others()

    def leave(self) -> None:
        """All is done, in every process."""
        self._leaving.set()
        self._channel.send({"bye": True})
        if self._hub is None:
            self._channel.close()
        self._await_others()

    def await_news(self) -> None:
        """Give the news that another process is gone the time to come, where an error may be what follows from that.

        One that has stopped breaks no channel: so all are asked whether they are there.
        """
        # How far this one is may not be known yet: what is said names the last step.
        self._channel.send({"beat": self._pace.beat})
        self._channel.send({"lost": True})
        self._listener.join(FAREWELL_S)

    def _tell_pace(self) -> None:
        while not self._leaving.wait(self._watch.tick_s):
            beat = self._pace.beat
            self._channel.send({"beat": beat})
            self._watch.heard(self.index, beat)
            if self._hub is None and (stall := self._watch.tick()) is not None and stall.members:
                message = stall_message(stall, {0: f"process 0 of {self.count}"}, self.count, self._stall_timeout_s)
                # For when it wakes up: then it is told why all others are gone.
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
                self._heed(message)
                self._changed.notify_all()
        self._end(f"process 0 of {self.count} {GONE}", 1, 0)

    def _heed(self, message: Message) -> None:
        if "exchanged" in message:
            self._exchanged[message["exchanged"]] = [Held(*held) for held in message["values"]]
        elif "freeze" in message:
            self._frozen = True
            self._channel.send({"begun": self._begun})
        elif "stop_after" in message:
            self._ending = Ending(message["stop_after"], message["why"])

    def _end(self, said: str, exit_code: int, grace_s: float) -> None:
        """End this process, where it does not by itself: a framework would wait for the others, whichever way it is left."""
        if self._leaving.wait(grace_s):
            return
        self._shown.end(f"process {self.index} of {self.count}: {said}", exit_code)
        self._await_others()
        os._exit(exit_code)

    def _await_others(self) -> None:
        if self._hub is not None:
            self._channel.close()
            self._hub.join(FAREWELL_S)


def must_agree(group: Group, told: dict[str, Any], what: str) -> None:
    """Raises InputError in every process where one was told otherwise than process 0; ``told``: values by name."""
    held = group.exchange(what, told)
    first = held[0].value
    lines = [
        f"  {name}: {first.get(name)!r} in process 0, {other.value.get(name)!r} in process {other.process}"
        for other in held[1:]
        for name in dict.fromkeys([*first, *other.value])
        if first.get(name) != other.value.get(name)
    ]
    if lines:
        raise InputError(
            f"{what}: the {group.count} processes of this run were not told the same:\n"
            + "\n".join(lines[:20])
            + "\nGive all of them the same command, text and files. Nothing was started."
        )
