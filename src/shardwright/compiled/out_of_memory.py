"""Reads the error of a compiler for a program that does not fit: its sizes, and a finding instead of a traceback.

libtpu refuses to compile such a program, with one of two messages; CPU and GPU compile any program.

| text | from |
|---|---|
| `the total memory required for HLO temporaries (192.00G) exceeds available HBM (95.74G)` | libtpu 0.0.42.1: arguments are counted too |
| `Used 33.27G of 30.75G hbm` | earlier releases |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.compiled.findings.fixes import settled
from shardwright.compiled.findings.memory import too_large
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.cost.advice import Settle, first_that_ends

RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
_SIZE = r"(\d+(?:\.\d+)?)\s?([KMGT]?)i?B?"
_SENTENCES = (
    re.compile(rf"required for [\w ]+ \({_SIZE}\) exceeds available \w+ \({_SIZE}\)"),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Bytes of one device, with the three or four digits that the compiler prints."""

    needed_bytes: int
    usable_bytes: int


def read_out_of_memory(text: str) -> OutOfMemory | None:
    """The sizes in a compiler's error; None if it is another error.

    >>> read_out_of_memory(
    ...     "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.00G) "
    ...     "exceeds available HBM (15.75G)."
    ... )
    OutOfMemory(needed_bytes=17179869184, usable_bytes=16911433728)
    >>> read_out_of_memory("INVALID_ARGUMENT: no such thing") is None
    True
    """
    for sentence in _SENTENCES:
        if found := sentence.search(text):
            needed, usable = (_bytes(found[number], found[number + 1]) for number in (1, 3))
            return OutOfMemory(needed_bytes=needed, usable_bytes=usable)
    return None


def out_of_memory_findings(plan: Plan, text: str, settle: Settle = first_that_ends) -> tuple[Finding, ...]:
    """SW312 from a compiler's error; none if the error has no sizes."""
    found = read_out_of_memory(text)
    if found is None:
        return ()
    memory = plan.memory
    rows = {
        "weights, predicted": memory.weights_bytes,
        "gradients, predicted": memory.gradients_bytes,
        "optimizer, predicted": memory.optimizer_bytes,
        **({"average, predicted": memory.average_bytes} if memory.average_bytes else {}),
        "activations, predicted": memory.activations_bytes,
    }
    drafted = too_large(plan, found.needed_bytes, rows, found.usable_bytes)
    return tuple(settled(plan, fixable, settle) for fixable in drafted)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** _POWERS[unit])
