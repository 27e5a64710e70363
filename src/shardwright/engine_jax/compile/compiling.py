"""The train step, compiled ahead of time for a machine that need not be present. Optimizer and donation are included."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.cost import Machine
from shardwright.engine_jax.compile.target import target_mesh
from shardwright.engine_jax.training.state import abstract_state
from shardwright.engine_jax.training.step import abstract_batch, train_step
from shardwright.training.optimizer import OptimizerOptions

SCHEDULE = OptimizerOptions(lr=1e-3, warmup=100, steps=1000, weight_decay=0.1, clip=1.0)
"""Any numbers: they do not change the program's shape. The step clips, decays and warms up, as in training."""


class Stats(NamedTuple):
    """The memory of a program as the compiler reports it, in bytes on one device. ``host_bytes``: temporaries in the host's memory."""

    arguments_bytes: int
    temporaries_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_bytes: int
    host_bytes: int


class Built(NamedTuple):
    """A compiled program as text."""

    text: str
    stats: Stats
    compile_seconds: float


class DoesNotFitError(Exception):
    """The compiler reports that a program needs too much memory. ``text``: its message."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class NoSuchOptionError(Exception):
    """The compiler does not have an option, or the option does not have the value. ``text``: its message."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class CannotBePrintedError(Exception):
    """The compiler made a program that this release of JAX cannot print as text. ``text``: its message."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def lower_step(plan: Plan, machine: Machine) -> jax.stages.Lowered:
    """The engine's train step, lowered for the machine.

    Raises FindingsError for a plan with errors, and InputError for a machine that cannot be compiled for.
    """
    require_lowered(plan)
    mesh = target_mesh(plan.mesh, machine)
    return train_step(plan, mesh, SCHEDULE).lower(abstract_state(plan, mesh), abstract_batch(plan, mesh))


def build(lowered: jax.stages.Lowered, machine: Machine, options: Mapping[str, str] = MappingProxyType({})) -> Built:
    """Compile with these options of the compiler. Raises NoSuchOptionError for one that it does not have. Raises DoesNotFitError where the compiler reports it (TPU); with other compilers the caller compares the sizes.

    Raises CannotBePrintedError for a compiled program that has no text.
    """
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options={name: _typed(value) for name, value in options.items()} or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFitError(str(error)) from None
        if options:
            raise NoSuchOptionError(str(error)) from None
        raise
    seconds = time.perf_counter() - began
    try:
        memory, text = compiled.memory_analysis(), compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise CannotBePrintedError(str(error)) from None
    assert memory is not None
    assert text is not None
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    output, aliased = memory.output_size_in_bytes, memory.alias_size_in_bytes
    total = arguments + temporaries + output - aliased
    # The CPU's own figure does not include temporaries.
    peak = getattr(memory, "peak_memory_in_bytes", 0) if machine.numbers is not None else 0
    host = memory.host_temp_size_in_bytes
    stats = Stats(arguments, temporaries, output, aliased, peak or total, host)
    return Built(text, stats, seconds)


def _typed(value: str) -> Any:
    """A value of an option, which the compiler takes in its type."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.removeprefix("-").isdecimal() else value
