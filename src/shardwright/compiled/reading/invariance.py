"""Which values in the body of a loop are loop-invariant."""

from __future__ import annotations

from functools import lru_cache

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Instruction

_FROM_OUTSIDE = frozenset({"recv", "recv-done", "infeed", "rng", "rng-get-and-update-state", "outfeed"})


def is_loop_invariant(callers: Callers, where: Computation, one: Instruction) -> bool:
    """Whether the operands of an instruction are the same in every iteration of the innermost loop; False outside loops."""
    calls = callers.get(where.name, ())
    if any(call.instruction.op == "while" for call in calls):
        return bool(one.operands) and all(name in _unchanged(where) for name in one.operands)
    if len(calls) != 1:
        return False
    return is_loop_invariant(callers, calls[0].computation, calls[0].instruction)


@lru_cache(maxsize=64)
def _unchanged(body: Computation) -> frozenset[str]:
    """The names of loop-invariant values: constants, unchanged loop-carried values, and values computed from them."""
    next_state = body.root.operands if body.root.op == "tuple" else ()
    found: set[str] = set()
    for one in body.instructions:
        if one.op == "parameter" or one.op in _FROM_OUTSIDE:
            continue
        if one.op == "get-tuple-element" and body.by_name[one.operands[0]].op == "parameter":
            index = one.number("index")
            if index is not None and index < len(next_state) and _is_passed_through(body, next_state[index], index):
                found.add(one.name)
        elif all(name in found for name in one.operands):
            found.add(one.name)
    return frozenset(found)


def _is_passed_through(body: Computation, name: str, index: int) -> bool:
    """Whether a value is the loop-carried element of this index, unchanged in this iteration."""
    one = body.by_name.get(name)
    while one is not None and one.op in ("copy", "bitcast"):
        one = body.by_name.get(one.operands[0])
    if one is None or one.op != "get-tuple-element" or one.number("index") != index:
        return False
    return body.by_name[one.operands[0]].op == "parameter"
