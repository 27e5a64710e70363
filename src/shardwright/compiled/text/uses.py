"""What a value of a compiled program is used for: the kinds of the instructions that consume it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Instruction, Program, users_of

_PASS_THROUGH = frozenset({"bitcast", "copy", "copy-start", "reshape", "convert"})
_ENDS = "-done"
_DEEPEST = 16


def uses(
    program: Program,
    callers: Callers,
    where: Computation,
    one: Instruction,
    element: int | None = None,
    *,
    packed: bool = False,
) -> tuple[str, ...]:
    """The kinds of the users of an instruction's value, each once, through pass-through instructions and inside fusions.

    ``element``: the tuple element, if one is meant. ``packed``: the value is a concatenation of tensors, which slices
    separate again.
    """
    pass_through = _PASS_THROUGH | {"slice"} if packed else _PASS_THROUGH
    search = _Search(program, callers, pass_through)
    return tuple(sorted(set(search.uses(where, one, element, 0))))


class _Search(NamedTuple):
    program: Program
    callers: Callers
    pass_through: frozenset[str]

    def uses(self, where: Computation, one: Instruction, element: int | None, depth: int) -> Iterator[str]:
        if depth > _DEEPEST:
            yield "..."
            return
        for user in users_of(where).get(one.name, ()):
            if user.op == "get-tuple-element":
                if element is None or user.number("index") == element:
                    yield from self.uses(where, user, None, depth + 1)
            elif user.op.endswith(_ENDS):
                yield from self.uses(where, user, element, depth + 1)
            elif user.op in self.pass_through:
                yield from self.uses(where, user, None, depth + 1)
            elif user.op == "fusion" and (called := self._called(user)) is not None:
                for parameter in _parameters(called, user, one.name):
                    yield from self.uses(called, parameter, None, depth + 1)
            elif user.op == "dynamic-slice" and user.operands[0] != one.name:
                yield "index"
            else:
                yield user.op
        if one.is_root:
            yield from self._outside(where, element, depth)

    def _outside(self, where: Computation, element: int | None, depth: int) -> Iterator[str]:
        """The uses of a computation's result in its caller."""
        calls = self.callers.get(where.name, ())
        if len(calls) == 1 and calls[0].instruction.op in ("fusion", "call-start", "async-start"):
            yield from self.uses(calls[0].computation, calls[0].instruction, element, depth + 1)
        else:
            yield "result"

    def _called(self, fusion: Instruction) -> Computation | None:
        return self.program.computations.get(fusion.callees[0]) if fusion.callees else None


def _parameters(called: Computation, fusion: Instruction, name: str) -> Iterator[Instruction]:
    """The parameters of a fusion that are a given value."""
    places = [place for place, operand in enumerate(fusion.operands) if operand == name]
    return (one for one in called.instructions if one.parameter in places)
