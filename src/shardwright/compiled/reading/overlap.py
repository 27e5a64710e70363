"""Whether an asynchronous collective has compute between its start and its done instruction."""

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
"""Instructions with smaller results are bookkeeping."""

_SYNCHRONOUS = re.compile(r'"is_sync":\s*true')


def is_overlapped(where: Computation, start: Instruction) -> bool:
    """Whether anything is computed between a start instruction and its done.

    True if the done is not in the same computation: a later iteration of a loop waits for it.
    """
    if _SYNCHRONOUS.search(start.rest):
        return False
    for one in where.instructions[places_of(where)[start.name] + 1 :]:
        if one.op.endswith("-done") and start.name in one.operands[:1]:
            return False
        if one.op in _WORK and sum(array.num_bytes for array in one.arrays) >= _SOME_BYTES:
            return True
    return True
