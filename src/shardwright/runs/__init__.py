"""A run's surroundings: text in, metrics, checkpoints and a progress bar out, processes that meet; on whatever engine.

    run(options, plan, shown, connection=..., make_engine=...)      the whole of it

An engine gives an ``Engine``, which makes the steps, and a ``Connection`` of its processes. What is told of a run is in
``shardwright.training.options``.
"""

from shardwright.runs.engine import Engine, StepMetrics
from shardwright.runs.processes.meeting import Connection
from shardwright.runs.records import RunError
from shardwright.runs.run import MakeEngine, run

__all__ = ["Connection", "Engine", "MakeEngine", "RunError", "StepMetrics", "run"]
