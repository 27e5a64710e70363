"""Compiled programs built by hand: those that a plan expects, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shardwright.compiled.agreement.widths import planned_dtype
from shardwright.compiled.reading.program import CompiledCollective, CompiledMemory, CompiledProgram
from shardwright.core.plan.plan import Plan, PlannedCollective

Change = Callable[[CompiledCollective], CompiledCollective | None]


def as_planned(plan: Plan, target: str = "cpu:8", **fields: Any) -> CompiledProgram:
    """The program of a compiler that follows the plan, on a target where nothing is rewritten."""
    memory = plan.memory
    state = memory.weights_bytes + memory.optimizer_bytes
    return CompiledProgram(
        target=target,
        collectives=tuple(compiled(plan, one) for one in plan.collectives),
        memory=CompiledMemory(
            arguments_bytes=state,
            temporaries_bytes=memory.total_bytes_per_device - state,
            output_bytes=state,
            aliased_bytes=state,
            peak_bytes=memory.total_bytes_per_device,
        ),
        compile_seconds=12.5,
        **fields,
    )


def compiled(plan: Plan, one: PlannedCollective) -> CompiledCollective:
    """A planned collective, unchanged."""
    return CompiledCollective(
        kind=one.kind,
        axes=one.axes,
        bytes_per_device=one.bytes_per_device,
        count_per_step=one.count_per_step,
        dtypes=(planned_dtype(plan, one),),
        component=one.component,
        phase=one.phase,
        tensors=one.tensors,
        source="src/mine.py:7",
        ragged=one.ragged,
        in_loop=one.count_per_step > 1,
        maximum=one.dtype == "int32",
    )


def changed(program: CompiledProgram, change: Change) -> CompiledProgram:
    """Each collective changed; None removes it."""
    found = (change(one) for one in program.collectives)
    return replace(program, collectives=tuple(one for one in found if one is not None))


def where(wanted: dict[str, Any], change: Change) -> Change:
    """The change, only for collectives with these values."""

    def only(one: CompiledCollective) -> CompiledCollective | None:
        return change(one) if all(getattr(one, name) == value for name, value in wanted.items()) else one

    return only


def with_more(program: CompiledProgram, more: Iterable[CompiledCollective]) -> CompiledProgram:
    """With collectives that the plan does not have."""
    return replace(program, collectives=(*program.collectives, *more))


def remembered(program: CompiledProgram, **fields: Any) -> CompiledProgram:
    """With other figures for its memory."""
    return replace(program, memory=replace(program.memory, **fields))
