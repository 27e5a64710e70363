"""Ctrl-C and SIGTERM end a run after the step at hand, so that it saves and leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether, and by which signal, the run was asked to end."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """A flag that the first signal sets. A second one does what it would have done without us.

    Off the main thread Python delivers no signals, and the flag stays down.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def caught(number: int, frame: FrameType | None) -> None:
        del frame
        stop.signal = signal.Signals(number)
        signal.signal(stop.signal, before[stop.signal])

    # None: a handler that was not set from Python, which cannot be put back.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in CAUGHT}
    for number in CAUGHT:
        signal.signal(number, caught)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
