"""A training run on any engine: it reads text, writes metrics and checkpoints, and joins its processes.

    run(options, plan, shown, connection=..., make_engine=...)      the entry point

An engine supplies an ``Engine``, which trains the steps, and a ``Connection`` of its processes. The options and the
progress of a run are in ``shardwright.training.options``.
"""

from shardwright.runs.engine import Engine, StepMetrics
from shardwright.runs.processes.rendezvous import Connection
from shardwright.runs.records import RunError
from shardwright.runs.run import MakeEngine, run

__all__ = ["Connection", "Engine", "MakeEngine", "RunError", "StepMetrics", "run"]
