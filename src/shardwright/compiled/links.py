"""What a compiled program sends over the links of a machine, and its step, by the rates that its plan has.

The program's collectives take the places of the plan's. Each keeps its component, phase and tensors, so what hides behind which products is
decided as for the plan. These are as planned:

- exchanges of tokens (``ragged``): a program has buffers for more than it sends
- the groups of a hop, which the text gives by their size alone
- in stages the timetable: the step changes by the difference of all collectives, as far as the plan's are exposed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.step import all_seconds, timed, times_of

UNNAMED = "a tensor without a name"
"""Stands for the tensors of a collective of which the compiler kept no name: the next product waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a device sends in a step. ``moved_bytes``: of its collectives, of operand or result the larger; ``bytes_between``: those of them over
    links between nodes or slices. ``link_seconds``: of all collectives, one after the other. ``step_seconds``: of the step that has them.
    Both None where a link has no rate."""

    moved_bytes: int
    bytes_between: int
    link_seconds: float | None
    step_seconds: float | None


def sent_by_plan(plan: Plan, mapping: MeshMapping) -> Sent:
    """What a plan with its times says."""
    link_seconds = _all(plan, mapping)
    return Sent(
        moved_bytes=_bytes(plan.collectives),
        bytes_between=_bytes(_between(plan.collectives, mapping)),
        link_seconds=link_seconds,
        step_seconds=None if plan.step is None else plan.step.seconds,
    )


def sent_by_program(plan: Plan, program: CompiledProgram, mapping: MeshMapping) -> Sent:
    """What the program of a plan that has its times sends."""
    compiled = replace(plan, collectives=tuple(_in_places(plan, program)))
    link_seconds = _all(compiled, mapping)
    return Sent(
        moved_bytes=_bytes(compiled.collectives),
        bytes_between=_bytes(_between(compiled.collectives, mapping)),
        link_seconds=link_seconds,
        step_seconds=_step_seconds(plan, compiled, link_seconds, mapping),
    )


def _step_seconds(plan: Plan, compiled: Plan, link_seconds: float | None, mapping: MeshMapping) -> float | None:
    step = plan.step
    if step is None or link_seconds is None:
        return None
    if plan.pipeline is None:
        changed = timed(compiled, mapping).step
        return None if changed is None else changed.seconds
    planned = _all(plan, mapping)
    if not planned:
        return step.seconds + link_seconds
    return step.seconds + (link_seconds - planned) / planned * step.exposed_seconds


def _all(plan: Plan, mapping: MeshMapping) -> float | None:
    assert mapping.machine.numbers is not None
    seconds = all_seconds(plan, times_of(plan, mapping), mapping.machine.numbers)
    known = [second for second in seconds if second is not None]
    return sum(known) if len(known) == len(seconds) else None


def _in_places(plan: Plan, program: CompiledProgram) -> Iterator[PlannedCollective]:
    yield from (planned for planned in plan.collectives if planned.ragged)
    for compiled in program.collectives:
        if not compiled.ragged:
            yield _in_place(plan, compiled)


def _in_place(plan: Plan, compiled: CompiledCollective) -> PlannedCollective:
    twin = _twin(plan, compiled)
    is_alike = twin is not None and compiled.kind in (twin.kind, twin.compiled_as)
    return PlannedCollective(
        component=compiled.component or "residual",
        phase=compiled.phase or "backward",
        kind=compiled.kind,
        axes=compiled.axes,
        bytes_per_device=compiled.bytes_per_device,
        count_per_step=compiled.count_per_step,
        tensors=compiled.tensors or (UNNAMED,),
        subgroup=None if twin is None else twin.subgroup,
        beside=twin.beside if twin is not None and is_alike else (),
        rearranged=twin is not None and is_alike and twin.rearranged,
    )


def _twin(plan: Plan, compiled: CompiledCollective) -> PlannedCollective | None:
    """The planned collective over groups of the same size of the same axes that is the most like the compiled one."""
    size = compiled.group_size or _size(plan, compiled.axes)
    twins = [
        planned
        for planned in plan.collectives
        if set(planned.axes) == set(compiled.axes)
        and (_size(plan, planned.axes) if planned.subgroup is None else planned.subgroup.size) == size
    ]

    def likeness(planned: PlannedCollective) -> tuple[bool, bool, bool, bool]:
        return (
            compiled.kind in (planned.kind, planned.compiled_as),
            planned.component == compiled.component,
            planned.phase == compiled.phase,
            not set(planned.tensors).isdisjoint(compiled.tensors),
        )

    return max(twins, key=likeness, default=None)


def _size(plan: Plan, axes: Iterable[str]) -> int:
    return prod(plan.mesh.size(axis) for axis in axes)


def _between(collectives: Sequence[PlannedCollective], mapping: MeshMapping) -> list[PlannedCollective]:
    return [sent for sent in collectives if mapping.group(sent.axes, sent.subgroup).domains > 1]


def _bytes(collectives: Sequence[PlannedCollective]) -> int:
    return sum(sent.bytes_per_device * sent.count_per_step for sent in collectives)
