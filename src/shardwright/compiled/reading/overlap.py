"""Whether a collective is begun early and waited for later, with work in between."""

from __future__ import annotations

import re

from shardwright.compiled.text.hlo import Computation, Instruction, places_of

_WORK = frozenset(
    {
        *("fusion", "dot", "convolution", "while", "conditional", "call", "custom-call", "sort", "reduce"),
        *("scatter", "gather", "copy", "transpose", "reduce-window", "select-and-scatter"),
    }
)
_SOME_BYTES = 1024
"""What leaves less is bookkeeping."""

_IN_TURN = re.compile(r'"is_sync":\s*true')


def is_overlapped(where: Computation, start: Instruction) -> bool:
    """For what is begun in one instruction and ends in another: whether anything is computed meanwhile.

    True where the end is not in the same computation: it is awaited in a later turn of a loop.
    """
    if _IN_TURN.search(start.rest):
        return False
    for one in where.instructions[places_of(where)[start.name] + 1 :]:
        if one.op.endswith("-done") and start.name in one.operands[:1]:
            return False
        if one.op in _WORK and sum(array.num_bytes for array in one.arrays) >= _SOME_BYTES:
            return True
    return True
