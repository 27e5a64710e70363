"""How JAX connects the processes of a run once each has found the others, before JAX looks for devices."""

from __future__ import annotations

import ctypes
import signal

import jax

from shardwright.core.findings.errors import InputError
from shardwright.engine_jax.io.exchange import LOST
from shardwright.runs.processes.rendezvous import Connection
from shardwright.training.cluster import Processes

HEARTBEAT_TIMEOUT_S = 10_000_000
"""JAX's own timeout, which aborts all other processes. Ours ends first: it reports which process has stopped, and ends the others
(``runs/processes/pace.py``)."""


def _delay_abort() -> None:
    """Let an abort of this process take effect only after some seconds.

    When process 0 is lost, a thread of JAX aborts this process within milliseconds. The thread that ends a run with the cause
    (``runs/processes/group.py``) detects the same, and needs longer on a busy machine. A handler in Python would run too late,
    so the handler is ``sleep`` of the C library, which a handler may call: it gets the number of the signal, 6, as its seconds.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _connect(processes: Processes) -> None:
    # Gloo runs the collectives of CPU processes; accelerators do not use this setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would handle SIGTERM itself from here on.
    jax.config.update("jax_enable_preemption_service", False)
    _delay_abort()
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            cluster_detection_method=processes.launcher or "deactivate",
            initialization_timeout=processes.join_timeout_s,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise InputError(f"JAX cannot connect the {processes.count} processes: {error}") from None


CONNECTION = Connection(connect=_connect, disconnect=jax.distributed.shutdown, lost=LOST)
