"""Where the processes of a run meet: a thread of process 0 that every process, the first too, has a channel to.

| a process says | the hub does |
|---|---|
| `exchange`, `value`, `timeout_s` | waits for the same from all, then tells all which values there are and who had each first |
| `stop` | asks all how far they are (`freeze`), and tells all the last step that any has begun (`stop_after`) |
| `failed`, `exit_code` | tells all the others, so that none waits for it |
| `bye` | lets it go |
| nothing, and its channel breaks | tells all the others that it is gone |
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from shardwright.runs.channel import Channel, Message

GONE = "is gone: it was killed, or its machine is lost. So this one ends too. Start all of them again, with --resume."


class Hub:
    """Ends when every process has left. ``hosts``: for each process where it runs, to be named when it is gone."""

    def __init__(self, channels: Mapping[int, Channel], hosts: Mapping[int, str]) -> None:
        self._channels, self._hosts = dict(channels), hosts
        self._count = len(channels)
        # Of each exchange under way what has come, by process; how long the rest is waited for, and until when.
        self._exchanges: dict[str, dict[int, Any]] = {}
        self._waits: dict[str, tuple[float, float]] = {}
        self._steps: dict[int, int] = {}
        self._why_stop: str | None = None
        self._left: set[int] = set()
        self._ended = False
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
        with selectors.DefaultSelector() as selector:
            for index, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select(self._next_deadline()):
                    index = key.data
                    messages, there = self._channels[index].received()
                    for message in messages:
                        self._hear(index, message)
                    if not there:
                        selector.unregister(self._channels[index])
                        self._channels[index].close()
                        self._lose(index)
                self._give_up_waiting()

    def _hear(self, index: int, message: Message) -> None:
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
            self._left.add(index)
            told = f"{self._named(index)} ended with an error, so this one ends too. It said:\n{message['failed']}"
            self._end(told, message["exit_code"], failed=True)
        elif "bye" in message:
            self._left.add(index)

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
            self._left.add(index)
            self._end(f"{self._named(index)} {GONE}", 1)

    def _give_up_waiting(self) -> None:
        for name, (timeout_s, deadline) in self._waits.items():
            if time.monotonic() >= deadline:
                missing = [self._named(index) for index in range(self._count) if index not in self._exchanges[name]]
                shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                self._end(f"{name}: waited {timeout_s:g} s for {shown}, and no longer.", 1)

    def _next_deadline(self) -> float | None:
        if self._ended or not self._waits:
            return None
        return max(0.0, min(deadline for _, deadline in self._waits.values()) - time.monotonic())

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
