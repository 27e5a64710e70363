"""Whether an asynchronous collective has a product between its start and its done instruction.

| in the text | counts |
|---|---|
| `dot`, `convolution`, a library's product, a custom kernel | yes: our kernels are attention and products of experts |
| a fusion, loop, branch or call that contains one of these | yes |
| a copy, an addition or a norm | no: it is short, and needs the memory that the collective writes to |
| another collective | no: it waits for the same links |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardwright.compiled.text.calls import callees
from shardwright.compiled.text.hlo import Computation, Instruction, Program, places_of

_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot"})
_KERNELS = re.compile(
    r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu\$xla\.gpu\.triton|__(?:cublas|cudnn|triton|onednn))'
)
_SOME_BYTES = 1024
"""Instructions with smaller results are bookkeeping."""

_SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
_LAST_STEP = '"AsyncCollectiveDone"'


def computations_with_products(program: Program) -> frozenset[str]:
    """The names of the computations that multiply, themselves or in one that they run."""
    known: dict[str, bool] = {}

    def multiplies(name: str) -> bool:
        if name not in known:
            known[name] = False
            instructions = program.computations[name].instructions if name in program.computations else ()
            known[name] = any(_is_product(one) or any(map(multiplies, callees(one))) for one in instructions)
        return known[name]

    return frozenset(filter(multiplies, program.computations))


def is_overlapped(with_products: frozenset[str], where: Computation, start: Instruction) -> bool:
    """Whether a product is computed between a start instruction and its done; where the done is not in the same computation, between
    the start and the end of an iteration of the loop. ``with_products``: the computations that have some."""
    if _SYNCHRONOUS.search(start.rest):
        return False
    ends = (one.op.endswith("-done") and start.name in one.operands[:1] for one in _after(where, start))
    return _has_product(with_products, where, start, ends)


def is_overlapped_in_steps(
    program: Program, with_products: frozenset[str], where: Computation, first: Instruction, channel: int | None
) -> bool:
    """The same of a collective that several fusions do in steps. ``first``: the fusion of the first step; ``channel``: that of all its steps."""

    def is_last(one: Instruction) -> bool:
        inside = (program.computations[name].instructions for name in callees(one) if name in program.computations)
        return any(
            any(_LAST_STEP in each.rest for each in found)
            and any(each.number("channel_id") == channel for each in found)
            for found in inside
        )

    return _has_product(with_products, where, first, map(is_last, _after(where, first)))


def _has_product(with_products: frozenset[str], where: Computation, start: Instruction, ends: Iterable[bool]) -> bool:
    for one, is_end in zip(_after(where, start), ends, strict=True):
        if is_end:
            return False
        if (_is_product(one) or not with_products.isdisjoint(callees(one))) and _is_large(one):
            return True
    return False


def _after(where: Computation, start: Instruction) -> Sequence[Instruction]:
    return where.instructions[places_of(where)[start.name] + 1 :]


def _is_product(one: Instruction) -> bool:
    return one.op in _PRODUCTS or (one.op == "custom-call" and _KERNELS.search(one.rest) is not None)


def _is_large(one: Instruction) -> bool:
    return sum(array.num_bytes for array in one.arrays) >= _SOME_BYTES
