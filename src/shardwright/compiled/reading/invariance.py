"""Which values in the body of a loop are the same in every turn."""

from __future__ import annotations

from functools import lru_cache

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Instruction

_FROM_OUTSIDE = frozenset({"recv", "recv-done", "infeed", "rng", "rng-get-and-update-state", "outfeed"})


def is_loop_invariant(callers: Callers, where: Computation, one: Instruction) -> bool:
    """Whether an instruction takes the same in every turn of the innermost loop around it; False outside of loops."""
    calls = callers.get(where.name, ())
    if any(call.instruction.op == "while" for call in calls):
        return bool(one.operands) and all(name in _unchanged(where) for name in one.operands)
    if len(calls) != 1:
        return False
    return is_loop_invariant(callers, calls[0].computation, calls[0].instruction)


@lru_cache(maxsize=64)
def _unchanged(body: Computation) -> frozenset[str]:
    """The names of what no turn of a loop changes: constants, what it carries as it is, and what is made of them."""
    carried = body.root.operands if body.root.op == "tuple" else ()
    found: set[str] = set()
    for one in body.instructions:
        if one.op == "parameter" or one.op in _FROM_OUTSIDE:
            continue
        if one.op == "get-tuple-element" and body.by_name[one.operands[0]].op == "parameter":
            index = one.number("index")
            if index is not None and index < len(carried) and _carries(body, carried[index], index):
                found.add(one.name)
        elif all(name in found for name in one.operands):
            found.add(one.name)
    return frozenset(found)


def _carries(body: Computation, name: str, index: int) -> bool:
    """Whether a value is an element of what a loop carries, as it was handed to this turn."""
    one = body.by_name.get(name)
    while one is not None and one.op in ("copy", "bitcast"):
        one = body.by_name.get(one.operands[0])
    if one is None or one.op != "get-tuple-element" or one.number("index") != index:
        return False
    return body.by_name[one.operands[0]].op == "parameter"
