"""The largest temporaries of a compiled program, and what they are.

Values without memory of their own are left out: arguments, constants, aliases, results that are written into an
operand, and results of the step. Values inside a fusion are never in memory. Sizes are those of the layout: with tiles
128 wide, a column of numbers takes 128 columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.compiled.reading.program import Temporary
from shardwright.compiled.text.calls import Callers, Execution
from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.origins import NOWHERE, Sources, merged, origins_of
from shardwright.compiled.text.shapes import Array, our_dtype
from shardwright.compiled.text.values import ALIASES, Value, made_from, origin_of

NUMBER = 10

_NO_MEMORY = ALIASES | {"parameter", "constant", "after-all", "partition-id", "replica-id", "send", "recv"}
_OPAQUE = ("fusion", "custom-call", "async-start", "call-start")
_HOST = 5
"""The number of the host's memory."""
_IN_PLACE = "dynamic-update-slice"
_ALIASED = re.compile(r"\{([\d,]*)\}: \(\d+, \{[\d,]*\}")


def largest_temporaries(
    program: Program, callers: Callers, runs: Mapping[str, Execution], sources: Sources, number: int = NUMBER
) -> tuple[Temporary, ...]:
    """The largest values that are neither arguments nor results of the step; equal ones are one row, the largest first."""
    returned = _returned(program, callers)
    entry = program.computations[program.entry]
    on_tpu = any(array.tiled for one in entry.instructions for array in one.arrays)
    found: list[tuple[int, Array, Value]] = []
    for name in runs:
        computation = program.computations[name]
        if _is_inside(callers, name):
            continue
        for one in computation.instructions:
            if one.op in _NO_MEMORY or one.op.endswith("-start") or (name, one.name) in returned:
                continue
            arrays = _own_arrays(program, computation, one, on_tpu)
            found += [(array.num_bytes_laid_out, array, Value(computation, one)) for array in arrays]
    found.sort(key=lambda each: -each[0])
    rows: dict[Temporary, int] = {}
    smallest = 0
    for num_bytes, array, value in found:
        if len(rows) == number and num_bytes < smallest:
            break
        row = _temporary(program, callers, sources, array, value)
        if row in rows or len(rows) < number:
            rows[row] = rows.get(row, 0) + 1
            smallest = num_bytes
    return tuple(replace(row, num_values=values) for row, values in rows.items())


def _temporary(program: Program, callers: Callers, sources: Sources, array: Array, value: Value) -> Temporary:
    one = value.one
    origin = merged(origins_of(one.op_name)) if one.op_name else NOWHERE
    if origin == NOWHERE:
        origin = replace(origin_of(program, callers, value), operation=None)
    return Temporary(
        bytes_per_device=array.num_bytes_laid_out,
        dtype=our_dtype(array.dtype),
        shape=array.dims,
        op=one.op,
        component=origin.component,
        phase=origin.phase,
        operation=origin.operation,
        source=sources.of_instruction(one.rest),
    )


def _own_arrays(program: Program, where: Computation, one: Instruction, on_tpu: bool) -> Iterator[Array]:
    """The result arrays of an instruction that are newly allocated in the device's main memory.

    ``on_tpu``: memory spaces are on-chip memories; on GPU they are regions of the main memory.
    """
    arrays = one.arrays
    aliased = _aliased(one)
    roots = _roots(program, one)
    taken = {(a.dtype, a.dims) for name in one.operands if (o := where.by_name.get(name)) for a in o.arrays}
    for place, array in enumerate(arrays):
        elsewhere = array.space == _HOST or (on_tpu and array.space)
        root = roots[place] if place < len(roots) else None
        in_place = root == _IN_PLACE and (array.dtype, array.dims) in taken
        if not elsewhere and not in_place and place not in aliased:
            yield array


def _aliased(one: Instruction) -> set[int]:
    """The indices of results that are written into operands."""
    start = one.rest.find("output_to_operand_aliasing={")
    if start == -1:
        return set()
    stop = one.rest.find("})}", start)
    text = one.rest[start + len("output_to_operand_aliasing={") : stop + 2]
    return {int(place.split(",")[0]) if place else 0 for place in _ALIASED.findall(text)}


def _roots(program: Program, one: Instruction) -> list[str]:
    """The kind of the instruction that produces each array, also inside a fusion."""
    called = program.computations.get(one.callees[0]) if one.op == "fusion" and one.callees else None
    if called is None:
        return [one.op]
    root = called.root
    makers = [called.by_name.get(name) for name in root.operands] if root.op == "tuple" else [root]
    return [_kind_through_bitcasts(called, maker) for maker in makers]


def _kind_through_bitcasts(where: Computation, one: Instruction | None) -> str:
    """The kind of an instruction, through bitcasts of its result."""
    while one is not None and one.op == "bitcast" and one.operands:
        one = where.by_name.get(one.operands[0])
    return "" if one is None else one.op


def _is_inside(callers: Callers, name: str) -> bool:
    """Whether a computation is the body of one instruction, such as a fusion, of which only the results are in memory."""
    return any(call.instruction.op in _OPAQUE for call in callers.get(name, ()))


def _returned(program: Program, callers: Callers) -> set[tuple[str, str]]:
    """Computation and name of the values that a step returns, through aliases and in-place writes."""
    entry = program.computations[program.entry]
    found: set[tuple[str, str]] = set()
    places = range(len(entry.root.operands)) if entry.root.op == "tuple" else (None,)
    todo = [Value(entry, entry.root, place) for place in places]
    seen: set[tuple[str, str, int | None]] = set()
    while todo:
        value = todo.pop()
        key = (value.where.name, value.one.name, value.element)
        if key in seen:
            continue
        seen.add(key)
        if value.one.op in ALIASES or value.one.op == "parameter":
            todo += made_from(program, callers, value)
            continue
        found.add((value.where.name, value.one.name))
        roots = _roots(program, value.one)
        root = roots[value.element or 0] if (value.element or 0) < len(roots) else ""
        if root == _IN_PLACE:
            shape = [(a.dtype, a.dims) for a in value.one.arrays][value.element or 0]
            operands = [value.where.by_name.get(name) for name in value.one.operands]
            todo += [
                Value(value.where, one)
                for one in operands
                if one is not None and shape in [(a.dtype, a.dims) for a in one.arrays]
            ]
    return found
