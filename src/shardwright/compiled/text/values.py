"""What a value of a compiled program is computed from, through tuples, loops, calls and copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Instruction, Program, users_of
from shardwright.compiled.text.origins import NOWHERE, Origin, merged, origins_of

ALIASES = frozenset(
    {"tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "optimization-barrier", "add-dependency"}
)
"""Instructions whose result is not a new value."""

_NAMED_AFTER = frozenset(
    {"get-tuple-element", "bitcast", "copy", "copy-start", "copy-done", "all-gather-done", "convert", "call-done"}
)
"""Instructions that may have the name of their operand."""

_MOST = 64
"""The largest number of instructions that a search visits."""


class Value(NamedTuple):
    """An instruction and its computation; ``element``: the element of its result tuple, if one is meant."""

    where: Computation
    one: Instruction
    element: int | None = None


def made_from(program: Program, callers: Callers, value: Value) -> Iterator[Value]:
    """The direct sources or aliases of a value; for a loop-carried value, that on entry and that of an iteration."""
    where, one, element = value
    if one.op == "get-tuple-element":
        yield from _operands(where, one, (0,), one.number("index"))
    elif one.op == "parameter":
        for call in callers.get(where.name, ()):
            yield from _given(call.computation, call.instruction, where, one, element)
        if element is not None and where.root.op == "tuple" and _is_body(callers, where):
            yield from _operands(where, where.root, (element,), None)
    elif one.op == "tuple":
        yield from _operands(where, one, None if element is None else (element,), None)
    elif one.op == "while":
        yield from _operands(where, one, (0,), element)
        body = program.computations.get(one.callee("body") or "")
        if body is not None and element is not None and body.root.op == "tuple":
            yield from _operands(body, body.root, (element,), None)
    elif one.op == "fusion" and one.callees and (called := program.computations.get(one.callees[0])) is not None:
        yield Value(called, called.root, element)
    else:
        yield from _operands(where, one, None, element if one.op in ("optimization-barrier", "copy") else None)


def origin_of(program: Program, callers: Callers, value: Value) -> Origin:
    """The origin of the nearest named instructions that a value is computed from; its own name counts first."""
    queue, seen = deque([value]), {(value.where.name, value.one.name, value.element)}
    named: list[Origin] = []
    looked = 0
    while queue and looked < _MOST:
        for _ in range(len(queue)):
            here = queue.popleft()
            looked += 1
            name = here.one.op_name
            if (
                name is not None
                and here.one.op != "parameter"
                and not (here.one.op == "fusion" and here.element is not None)
            ):
                named.append(merged(origins_of(name)))
                continue
            for source in made_from(program, callers, here):
                key = (source.where.name, source.one.name, source.element)
                if key not in seen:
                    seen.add(key)
                    queue.append(source)
        if named:
            break
    return merged(named)


def used_by(value: Value) -> Origin:
    """The origin of the nearest named instructions that use a value, in the same computation."""
    queue, seen = deque([value]), {value.one.name}
    for _ in range(_MOST):
        if not queue:
            break
        where, one, element = queue.popleft()
        users = users_of(where).get(one.name, ())
        if element is not None and one.op != "get-tuple-element":
            # For asynchronous collectives the done instruction names the tensor.
            users = [user for user in users if user.op != "get-tuple-element" or user.number("index") == element]
        named = [merged(origins_of(user.op_name)) for user in users if user.op_name and user.op not in _NAMED_AFTER]
        if any(origin != NOWHERE for origin in named):
            return merged(named)
        ends = (user for user in users if user.op in _NAMED_AFTER and user.name not in seen)
        for user in ends:
            seen.add(user.name)
            queue.append(Value(where, user, element if user.op.endswith("-done") else None))
    return NOWHERE


def _operands(
    where: Computation, one: Instruction, places: tuple[int, ...] | None, element: int | None
) -> Iterator[Value]:
    names = one.operands
    for place in range(len(names)) if places is None else places:
        if place < len(names) and (source := where.by_name.get(names[place])) is not None:
            yield Value(where, source, element)


def _given(
    outside: Computation, call: Instruction, where: Computation, one: Instruction, element: int | None
) -> Iterator[Value]:
    """The argument of a computation's parameter in its caller."""
    place = 0 if call.op == "while" else one.parameter or 0
    if call.op == "conditional":
        place = 1 + call.callees.index(where.name)
    yield from _operands(outside, call, (place,), element)


def _is_body(callers: Callers, where: Computation) -> bool:
    calls = callers.get(where.name, ())
    return any(call.instruction.op == "while" and call.instruction.callee("body") == where.name for call in calls)
