"""Which computation runs which others, and how often each runs in a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.loops import trip_count

_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)"?\}')

_CALLING = frozenset({"while", "fusion", "call", "conditional", "custom-call", "async-start", "call-start"})
"""Instructions that run computations. Others name reducers, which contain nothing of interest."""

_TAKEN = re.compile(r"taken=(\d+)of(\d+)/cond$")
"""The end of the name of a branch that says how often it is taken, of the turns in which the program reaches it."""


@dataclass(frozen=True, slots=True)
class Call:
    """An instruction that runs a computation, and the computation that contains the instruction."""

    computation: Computation
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How often a computation runs in a step. ``counted`` False: the trip count of a loop around it is unknown, and
    counts as 1."""

    times: Fraction = Fraction(0)
    in_loop: bool = False
    counted: bool = True


Callers = Mapping[str, tuple[Call, ...]]


def callers_of(program: Program) -> Callers:
    """The callers of each computation that has any."""
    found: dict[str, list[Call]] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            for callee in callees(instruction):
                found.setdefault(callee, []).append(Call(computation, instruction))
    return {name: tuple(calls) for name, calls in found.items()}


def callees(instruction: Instruction) -> tuple[str, ...]:
    """The computations that an instruction runs, without reducers."""
    return instruction.callees if instruction.op in _CALLING else ()


def executions(program: Program, callers: Callers, unknown: Fraction | None = None) -> Mapping[str, Execution]:
    """How often each computation runs: from the entry on, times the trip count of each loop.

    Every branch counts as taken, but one whose name says how often it is. ``unknown``: the trip count to use for loops whose text does not give it.
    """
    found: dict[str, Execution] = {program.entry: Execution(times=Fraction(1))}
    for name in _callers_first(program):
        here = found[name]
        computation = program.computations[name]
        for instruction in computation.instructions:
            called = callees(instruction)
            if not called:
                continue
            times, counted, in_loop = here.times, here.counted, here.in_loop
            if instruction.op == "while":
                trips = trips_of(program, callers, computation, instruction)
                known_trips = unknown if trips is None else trips
                times, counted, in_loop = (
                    times * (1 if known_trips is None else known_trips),
                    counted and known_trips is not None,
                    True,
                )
            elif instruction.op == "conditional":
                times *= share_taken(instruction)
            for callee in called:
                before = found.get(callee, Execution())
                found[callee] = Execution(
                    times=before.times + times,
                    in_loop=before.in_loop or in_loop,
                    counted=before.counted and counted,
                )
    return found


def share_taken(branch: Instruction) -> Fraction:
    """The share of turns in which a branch is taken, as its name says it; 1 if it does not."""
    found = _TAKEN.search(branch.op_name or "")
    return Fraction(int(found[1]), int(found[2])) if found else Fraction(1)


def trips_of(program: Program, callers: Callers, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a loop: the compiler's, else computed from condition, start and step; None if neither is known."""
    if known := _KNOWN_TRIPS.search(loop.rest):
        return int(known[1])

    def around(inner: str) -> tuple[Computation, Instruction] | None:
        calls = callers.get(inner, ())
        loops = {call.instruction.name: (call.computation, call.instruction) for call in calls}
        return next(iter(loops.values())) if len(loops) == 1 else None

    return trip_count(program.computations, computation, loop, around)


def _callers_first(program: Program) -> Iterator[str]:
    """Every computation that the entry reaches, each after all of its callers."""
    done: dict[str, None] = {}
    seen = {program.entry}
    stack = [(program.entry, _all_callees(program, program.entry))]
    while stack:
        name, rest = stack[-1]
        for callee in rest:
            if callee not in seen and callee in program.computations:
                seen.add(callee)
                stack.append((callee, _all_callees(program, callee)))
                break
        else:
            stack.pop()
            done[name] = None
    return reversed(done)


def _all_callees(program: Program, name: str) -> Iterator[str]:
    return (callee for one in program.computations[name].instructions for callee in callees(one))
