"""The trip count of a loop, computed from its text: trips = (bound - start) / step.

The condition compares a loop-carried element with a bound, and the body adds a step to the element. Its start is its
value on entry. The bound alone is not enough: loops of windowed products have a bound of 4 and a step of 2. Start and
bound may be loop-carried too, by this loop or one around it, if no iteration changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwright.compiled.text.hlo import Computation, Instruction

Computations = Mapping[str, Computation]
Around = Callable[[str], tuple[Computation, Instruction] | None]
"""The one instruction that runs a computation, and the computation that contains it; None if there are several."""

_SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"})
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
_DEEPEST = 32


class Term(NamedTuple):
    """An element of a computation's parameter tuple plus a number; ``element`` None: the number alone."""

    element: int | None
    number: int


class Comparison(NamedTuple):
    direction: str
    left: Term
    right: Term


def trip_count(computations: Computations, where: Computation, loop: Instruction, around: Around) -> int | None:
    """The trip count of a loop in ``where``; None if its text does not determine it."""
    condition, body = (computations.get(loop.callee(role) or "") for role in ("condition", "body"))
    if condition is None or body is None:
        return None
    found = _comparison(computations, condition, condition.root, None, 0)
    if found is None:
        return None
    direction, left, right = found
    if left.element is None:
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    if left.element is None:
        return None
    step = _step(computations, body, left.element)
    start = _number(computations, where, _initial_value(where, loop, left.element), around, 0)
    bound = right.number
    if right.element is not None:
        if _step(computations, body, right.element) != 0:
            return None
        entered = _number(computations, where, _initial_value(where, loop, right.element), around, 0)
        if entered is None:
            return None
        bound += entered
    if not step or start is None:
        return None
    return _trips(direction, bound - left.number - start, step)


def _trips(direction: str, distance: int, step: int) -> int | None:
    """
    >>> _trips("LT", 4, 2), _trips("LT", 5, 2), _trips("LE", 4, 2), _trips("GT", -3, -1), _trips("NE", 6, 3)
    (2, 3, 3, 3, 2)
    """
    if direction in ("GT", "GE"):
        direction, distance, step = _MIRRORED[direction], -distance, -step
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE") or step <= 0:
        return None
    return max(0, -(-distance // step) if direction == "LT" else distance // step + 1)


def _comparison(
    computations: Computations, where: Computation, one: Instruction, given: Sequence[Term | None] | None, depth: int
) -> Comparison | None:
    """The comparison that gives a condition's result, through fusions around it."""
    if depth > _DEEPEST:
        return None
    if one.op == "compare":
        terms = [_term(computations, where, name, given, depth + 1) for name in one.operands]
        direction = one.rest.partition("direction=")[2][:2]
        if len(terms) != 2 or terms[0] is None or terms[1] is None:
            return None
        return Comparison(direction, terms[0], terms[1])
    if one.op in ("fusion", "call"):
        called = computations.get(one.callees[0]) if one.callees else None
        terms = [_term(computations, where, name, given, depth + 1) for name in one.operands]
        return None if called is None else _comparison(computations, called, called.root, terms, depth + 1)
    if one.op in _SAME_VALUE and one.operands and one.operands[0] in where.by_name:
        return _comparison(computations, where, where.by_name[one.operands[0]], given, depth + 1)
    return None


def _term(
    computations: Computations, where: Computation, name: str, given: Sequence[Term | None] | None, depth: int
) -> Term | None:
    """A value as an element of the parameter of ``where``, plus a number. ``given``: the parameters of a fusion."""
    one = where.by_name.get(name)
    if one is None or depth > _DEEPEST:
        return None

    def term(operand: int) -> Term | None:
        return _term(computations, where, one.operands[operand], given, depth + 1)

    if one.op == "constant":
        value = one.rest.split(")")[0]
        return Term(None, int(value)) if value.lstrip("-").isdigit() else None
    if one.op == "parameter" and given is not None:
        number = one.parameter or 0
        return given[number] if number < len(given) else None
    if one.op in _SAME_VALUE:
        return term(0)
    if one.op in ("add", "subtract"):
        left, right = term(0), term(1)
        if left is None or right is None or (left.element is not None and right.element is not None):
            return None
        if one.op == "add":
            return Term(left.element if right.element is None else right.element, left.number + right.number)
        return Term(left.element, left.number - right.number) if right.element is None else None
    if one.op in ("fusion", "call") and one.callees:
        called = computations.get(one.callees[0])
        terms = [term(place) for place in range(len(one.operands))]
        return None if called is None else _term(computations, called, called.root.name, terms, depth + 1)
    if one.op == "get-tuple-element":
        return _element(computations, where, one, given, depth)
    return None


def _element(
    computations: Computations, where: Computation, one: Instruction, given: Sequence[Term | None] | None, depth: int
) -> Term | None:
    source, index = where.by_name.get(one.operands[0]), one.number("index")
    if source is None or index is None:
        return None
    if source.op == "parameter" and given is None:
        return Term(index, 0)
    if source.op == "tuple":
        return _term(computations, where, source.operands[index], given, depth + 1)
    if source.op == "fusion" and source.callees and (called := computations.get(source.callees[0])):
        if called.root.op != "tuple":
            return None
        terms = [_term(computations, where, name, given, depth + 1) for name in source.operands]
        return _term(computations, called, called.root.operands[index], terms, depth + 1)
    return None


def _step(computations: Computations, body: Computation, element: int) -> int | None:
    """The number that one iteration adds to a loop-carried element; None if it is not such an addition."""
    if body.root.op != "tuple" or element >= len(body.root.operands):
        return None
    after = _term(computations, body, body.root.operands[element], None, 0)
    return after.number if after is not None and after.element == element else None


def _initial_value(where: Computation, loop: Instruction, element: int) -> str | None:
    """The name of the value of a loop-carried element on entry."""
    state = where.by_name.get(loop.operands[0]) if loop.operands else None
    while state is not None and state.op in ("copy", "optimization-barrier"):
        state = where.by_name.get(state.operands[0])
    return state.operands[element] if state is not None and state.op == "tuple" else None


def _number(computations: Computations, where: Computation, name: str | None, around: Around, depth: int) -> int | None:
    """A value as a number, searched through the enclosing loops as long as none of them changes it."""
    found = None if name is None else _term(computations, where, name, None, 0)
    if found is None or found.element is None or depth > _DEEPEST:
        return None if found is None or found.element is not None else found.number
    outer = around(where.name)
    if outer is None or outer[1].op != "while" or _step(computations, where, found.element) != 0:
        return None
    outside, loop = outer
    entered = _number(computations, outside, _initial_value(outside, loop, found.element), around, depth + 1)
    return None if entered is None else entered + found.number
