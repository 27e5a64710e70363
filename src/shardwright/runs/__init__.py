"""A training run on any engine: it reads text, writes metrics and checkpoints, and joins its processes.

run.py          a run from start to end
loop.py         the loop over steps: record, save, end
engine.py       the interface that an engine implements
source.py       the rows that a run reads
saving.py       saves of one or of several processes
background.py   asynchronous saves
resuming.py     at which checkpoint, or with which weights, a run begins
partial.py      weights of which some are new, left out or cast
fingerprint.py  what must be equal for a run to continue as the same run
hold.py         the lock of a run's folder
store.py        the object store of a run's checkpoints

    run(options, plan, shown, connection=..., make_engine=...)      the entry point

An engine supplies an ``Engine``, which trains the steps, and a ``Connection`` of its processes. The options and the
progress of a run are in ``shardwright.training.options``.
"""

from shardwright.runs.engine import Engine, OpenFolder, Reads, Weights
from shardwright.runs.metrics.records import RunError, StepMetrics
from shardwright.runs.processes.rendezvous import Connection
from shardwright.runs.processes.replicas import HeldReplica
from shardwright.runs.run import MakeEngine, run

__all__ = [
    "Connection",
    "Engine",
    "HeldReplica",
    "MakeEngine",
    "OpenFolder",
    "Reads",
    "RunError",
    "StepMetrics",
    "Weights",
    "run",
]
