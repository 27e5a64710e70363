"""The flag that a signal sets, and what the second one does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shardwright.runs.processes.signals import stop_on_signal


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as Python handles it: a shell makes processes in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_second_signal_does_what_it_always_did() -> None:
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_gets_no_signals() -> None:
    seen: list[bool] = []

    def look() -> None:
        with stop_on_signal() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False]
