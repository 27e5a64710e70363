"""Where the processes of a run meet: a thread of process 0 that every process, the first too, has a channel to.

| a process says | the hub does |
|---|---|
| `exchange`, `value`, `timeout_s` | waits for the same from all, then tells all which values there are and who had each first |
| `stop` | asks all how far they are (`freeze`), and tells all the last step that any has begun (`stop_after`) |
| `failed`, `exit_code` | tells all the others, so that none waits for it |
| `bye` | lets it go |
| nothing, and its channel breaks | tells all the others that it is gone |
| `beat`, every few seconds: how far it is | answers with one of its own |
| `beat` no longer, for longer than a step may take | tells all, it too, that it has stopped |
| `lost`: an operation between processes failed | asks all whether they are there (`ask`, `here`), and names who is not |
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
"""Who is asked whether it is there answers at once, whatever it is doing, unless it is stopped."""


class Hub:
    """Ends when every process has left. ``hosts``: for each process where it runs, to be named when it is gone."""

    def __init__(self, channels: Mapping[int, Channel], hosts: Mapping[int, str], stall_timeout_s: float) -> None:
        self._channels, self._hosts = dict(channels), hosts
        self._count = len(channels)
        # Of each exchange under way what has come, by process; how long the rest is waited for, and until when.
        self._exchanges: dict[str, dict[int, Any]] = {}
        self._waits: dict[str, tuple[float, float]] = {}
        self._steps: dict[int, int] = {}
        self._why_stop: str | None = None
        self._left: set[int] = set()
        self._watch, self._stall_timeout_s = Watch(channels, stall_timeout_s), stall_timeout_s
        self._next_tick = time.monotonic() + self._watch.tick_s
        # Those that were asked whether they are there, have not answered, and are waited for until then.
        self._asked: set[int] = set()
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
            # A fault of ours. Without a hub all would wait for ever; when this process ends, the others do.
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

    def _let_go(self, index: int) -> None:
        """It is neither told of anything nor waited for any more."""
        self._left.add(index)
        self._watch.forget(index)
        self._asked.discard(index)

    def _close(self, index: int) -> None:
        self._selector.unregister(self._channels[index])
        self._channels[index].close()

    def _hear(self, index: int, message: Message) -> None:
        self._watch.heard(index, beat_of(message["beat"]) if "beat" in message else None)
        self._asked.discard(index)
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
            self._let_go(index)
            told = f"{self._named(index)} ended with an error, so this one ends too. It said:\n{message['failed']}"
            self._end(told, message["exit_code"], failed=True)
        elif "lost" in message:
            if self._ask_until is None:
                self._ask_until = time.monotonic() + ANSWER_S
                self._asked = set(self._channels) - self._left - {index}
                self._tell_all({"ask": True})
        elif "bye" in message:
            self._let_go(index)

    def _collect(self, index: int, name: str, value: Any, timeout_s: float) -> None:
        values = self._exchanges.setdefault(name, {})
        self._waits.setdefault(name, (timeout_s, time.monotonic() + timeout_s))
        values[index] = value
        if len(values) == self._count:
            del self._exchanges[name], self._waits[name]
            held: list[tuple[Any, int]] = []
            for process, found in sorted(values.items()):
                if all(found != known for known, _ in held):
                    held.append((found, process))
            self._tell_all({"exchanged": name, "values": held})

    def _lose(self, index: int) -> None:
        if index not in self._left:
            self._let_go(index)
            self._end(f"{self._named(index)} {GONE}", 1)

    def _give_up_waiting(self) -> None:
        for name, (timeout_s, deadline) in self._waits.items():
            if time.monotonic() >= deadline:
                missing = [self._named(index) for index in range(self._count) if index not in self._exchanges[name]]
                shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                self._end(f"{name}: waited {timeout_s:g} s for {shown}, and no longer.", 1)

    def _look_for_silence(self) -> None:
        """Every tick, and where an answer is due. A tick that comes late is one all the same: this process was stopped."""
        if self._ended:
            return
        now = time.monotonic()
        if self._ask_until is not None and now >= self._ask_until:
            if self._asked:
                self._end_stalled(self._watch.stall(tuple(sorted(self._asked))))
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
            self._let_go(index)
            self._close(index)

    def _next_deadline(self) -> float | None:
        if self._ended:
            return None
        moments = [self._next_tick, *(until for _, until in self._waits.values())]
        if self._ask_until is not None:
            moments.append(self._ask_until)
        return max(0.0, min(moments) - time.monotonic())

    def _end(self, told: str, exit_code: int, *, failed: bool = False) -> None:
        """The first cause is told; what follows from it is not."""
        if not self._ended:
            self._ended = True
            self._tell_all({"gone": told, "exit_code": exit_code, "failed": failed})

    def _tell_all(self, message: Message) -> None:
        for index, channel in self._channels.items():
            if index not in self._left:
                channel.send(message)

    def _named(self, index: int) -> str:
        return f"process {index} of {self._count} ({self._hosts[index]})"
