"""The hub: a thread of process 0 to which every process has a channel, process 0 too.

| a process sends | the hub |
|---|---|
| `exchange`, `value`, `timeout_s` | waits for the same from all, then sends all the different values, with the first process of each |
| `stop` | asks all for the step that they have begun (`freeze`), and sends all the last of these (`stop_after`) |
| `failed`, `exit_code` | tells all the others, so that none waits for it |
| `bye` | forgets it |
| nothing, and its channel closes | tells all the others that it is gone |
| `beat`, every few seconds, with its progress | sends a beat of its own every few seconds |
| no `beat` for longer than a step may take | tells all, this process too, that it has stopped |
| `lost`: an operation between processes failed | asks all whether they are there (`ask`, `here`), and names those that are not |
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from shardwright.runs.processes.channel import Channel, Message
from shardwright.runs.processes.pace import Stall, Watch, beat_of, stall_message

GONE = "is gone: it was killed, or its machine is lost. So this one ends too. Start all of them again, with --resume."

ANSWER_S = 3
"""How long the hub waits for `here`. A process answers at once, whatever it is doing, unless it is stopped."""


class Hub:
    """Ends when every process has left. ``hosts``: the host of each process, for messages about it."""

    def __init__(self, channels: Mapping[int, Channel], hosts: Mapping[int, str], stall_timeout_s: float) -> None:
        self._channels, self._hosts = dict(channels), hosts
        self._count = len(channels)
        # For each exchange under way: the values received, by process; its timeout, and its deadline.
        self._exchanges: dict[str, dict[int, Any]] = {}
        self._waits: dict[str, tuple[float, float]] = {}
        self._steps: dict[int, int] = {}
        self._why_stop: str | None = None
        self._left: set[int] = set()
        self._watch, self._stall_timeout_s = Watch(channels, stall_timeout_s), stall_timeout_s
        self._next_tick = time.monotonic() + self._watch.tick_s
        # The processes that were asked whether they are there and have not answered, and the deadline for the answer.
        self._unanswered: set[int] = set()
        self._ask_until: float | None = None
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="shardwright hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every process has left, or no longer."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # A bug of ours. Without a hub all would wait for ever; when this process ends, the others end too.
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        with self._selector as selector:
            for index, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select(self._next_deadline()):
                    index = key.data
                    messages, there = self._channels[index].received()
                    for message in messages:
                        self._hear(index, message)
                    if not there:
                        self._close(index)
                        self._lose(index)
                self._give_up_waiting()
                self._look_for_silence()

    def _forget(self, index: int) -> None:
        """Send a process nothing more, and wait for it no longer."""
        self._left.add(index)
        self._watch.forget(index)
        self._unanswered.discard(index)

    def _close(self, index: int) -> None:
        self._selector.unregister(self._channels[index])
        self._channels[index].close()

    def _hear(self, index: int, message: Message) -> None:
        self._watch.heard(index, beat_of(message["beat"]) if "beat" in message else None)
        self._unanswered.discard(index)
        if "exchange" in message:
            self._collect(index, message["exchange"], message["value"], message["timeout_s"])
        elif "stop" in message:
            if self._why_stop is None:
                self._why_stop = f"{message['stop']} in process {index}"
                self._tell_all({"freeze": True})
        elif "begun" in message:
            self._steps[index] = message["begun"]
            if len(self._steps) == self._count:
                self._tell_all({"stop_after": max(self._steps.values()), "why": self._why_stop})
        elif "failed" in message:
            self._forget(index)
            why = f"{self._named(index)} ended with an error, so this one ends too. Its error:\n{message['failed']}"
            self._end(why, message["exit_code"], failed=True)
        elif "lost" in message:
            if self._ask_until is None:
                self._ask_until = time.monotonic() + ANSWER_S
                self._unanswered = set(self._channels) - self._left - {index}
                self._tell_all({"ask": True})
        elif "bye" in message:
            self._forget(index)

    def _collect(self, index: int, name: str, value: Any, timeout_s: float) -> None:
        values = self._exchanges.setdefault(name, {})
        self._waits.setdefault(name, (timeout_s, time.monotonic() + timeout_s))
        values[index] = value
        if len(values) == self._count:
            del self._exchanges[name], self._waits[name]
            different: list[tuple[Any, int]] = []
            for process, found in sorted(values.items()):
                if all(found != known for known, _ in different):
                    different.append((found, process))
            self._tell_all({"exchanged": name, "values": different})

    def _lose(self, index: int) -> None:
        if index not in self._left:
            self._forget(index)
            self._end(f"{self._named(index)} {GONE}", 1)

    def _give_up_waiting(self) -> None:
        for name, (timeout_s, deadline) in self._waits.items():
            if time.monotonic() >= deadline:
                missing = [self._named(index) for index in range(self._count) if index not in self._exchanges[name]]
                shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                self._end(f"{name}: waited {timeout_s:g} s for {shown}, and no longer.", 1)

    def _look_for_silence(self) -> None:
        """On every tick, and when an answer is due. A late tick counts as one: this process itself was stopped."""
        if self._ended:
            return
        now = time.monotonic()
        if self._ask_until is not None and now >= self._ask_until:
            if self._unanswered:
                self._end_stalled(self._watch.stall(tuple(sorted(self._unanswered))))
                return
            self._ask_until = None
        if now >= self._next_tick:
            late = now - self._next_tick
            self._waits = {name: (timeout_s, until + late) for name, (timeout_s, until) in self._waits.items()}
            self._next_tick = now + self._watch.tick_s
            self._tell_all({"beat": True})
            if (stall := self._watch.tick()) is not None:
                self._end_stalled(stall)

    def _end_stalled(self, stall: Stall) -> None:
        named = {index: self._named(index) for index in stall.members}
        self._end(stall_message(stall, named, self._count, self._stall_timeout_s), 1)
        for index in stall.members:
            self._forget(index)
            self._close(index)

    def _next_deadline(self) -> float | None:
        if self._ended:
            return None
        moments = [self._next_tick, *(until for _, until in self._waits.values())]
        if self._ask_until is not None:
            moments.append(self._ask_until)
        return max(0.0, min(moments) - time.monotonic())

    def _end(self, why: str, exit_code: int, *, failed: bool = False) -> None:
        """Tell all why the run ends. Only the first cause is sent, not its consequences."""
        if not self._ended:
            self._ended = True
            self._tell_all({"gone": why, "exit_code": exit_code, "failed": failed})

    def _tell_all(self, message: Message) -> None:
        for index, channel in self._channels.items():
            if index not in self._left:
                channel.send(message)

    def _named(self, index: int) -> str:
        return f"process {index} of {self._count} ({self._hosts[index]})"
