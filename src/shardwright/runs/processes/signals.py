"""Ctrl-C and SIGTERM end a run after the current step, so that it saves before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The signal that ends the run, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """A flag that the first signal sets. A second signal has its previous handler.

    Python delivers signals to the main thread only; in another thread the flag is never set.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def caught(number: int, frame: FrameType | None) -> None:
        del frame
        stop.signal = signal.Signals(number)
        signal.signal(stop.signal, before[stop.signal])

    # None: a handler that was not set from Python, which cannot be restored.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in CAUGHT}
    for number in CAUGHT:
        signal.signal(number, caught)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
