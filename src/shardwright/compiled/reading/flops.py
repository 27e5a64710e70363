"""Floating-point operations of the products of matrices in a compiled program: two for each multiplication.

| in the text | multiplications of one run |
|---|---|
| `dot` | elements of the result x those of the dims that are summed over |
| `convolution`, as TPU writes products | elements of the result x kernel input features x, along each spatial dim, the places where the kernel meets the input rather than its padding or its holes |
| a call of a library's product, as GPU writes some | as a `dot` |

What a kernel of one's own multiplies is not in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod

from shardwright.compiled.text.calls import Execution
from shardwright.compiled.text.hlo import Computation, Instruction, Program
from shardwright.compiled.text.origins import merged, origins_of

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas|triton_gemm|onednn)[^"]*"')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


Flops = Mapping[str | None, Fraction]
"""Operations of one device in a step by component; None: of the products without one."""


def read_flops(program: Program, runs: Mapping[str, Execution]) -> Flops | None:
    """What one device computes in a step; None where a loop with products in it does not say how often it runs."""
    found: dict[str | None, Fraction] = {}
    for name, computation in program.computations.items():
        run = runs.get(name)
        if run is None or not run.times:
            continue
        for one in computation.instructions:
            flops = flops_of(computation, one)
            if not flops:
                continue
            if not run.counted:
                return None
            component = merged(origins_of(one.op_name)).component if one.op_name else None
            found[component] = found.get(component, Fraction(0)) + flops * run.times
    return found


def flops_of(where: Computation, one: Instruction) -> int:
    """Operations of one run of an instruction; 0 for what is no product."""
    if one.op == "dot":
        contracted = _CONTRACTED.search(one.rest)
    elif one.op == "custom-call" and _LIBRARY.search(one.rest):
        contracted = _LIBRARY_CONTRACTED.search(one.rest)
    elif one.op == "convolution":
        return 2 * _of_convolution(where, one)
    else:
        return 0
    left = where.by_name[one.operands[0]].arrays[0].dims
    dims = [int(dim.strip('"')) for dim in contracted[1].split(",") if dim] if contracted else []
    return 2 * prod(one.arrays[0].dims) * prod(left[dim] for dim in dims)


def _of_convolution(where: Computation, one: Instruction) -> int:
    labels = _DIM_LABELS.search(one.rest)
    if labels is None:
        return 0
    left, kernel, result = (
        dict(zip(label, dims, strict=True))
        for label, dims in zip(
            labels.groups(),
            (*(where.by_name[name].arrays[0].dims for name in one.operands[:2]), one.arrays[0].dims),
            strict=True,
        )
    )
    windows = _windows(one.rest, sum(label.isdigit() for label in result))
    met = prod(
        window.met(left[label], kernel[label], result[label])
        for label, window in zip(sorted(filter(str.isdigit, result)), windows, strict=True)
    )
    # Groups of batches are apart from each other, as groups of features are in the kernel's own input features.
    batches = one.number("batch_group_count") or 1
    return left["b"] // batches * kernel["o"] * kernel["i"] * met


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How a kernel goes along one spatial dim. ``holes_left`` and ``holes_kernel``: the distance of elements."""

    stride: int = 1
    before: int = 0
    holes_left: int = 1
    holes_kernel: int = 1

    def met(self, left: int, kernel: int, result: int) -> int:
        """Pairs of a place of the result and an element of the kernel that meet an element of the input."""
        return _met(self, left, kernel, result)


@lru_cache(maxsize=4096)
def _met(window: Window, left: int, kernel: int, result: int) -> int:
    """A place p and an element k meet at p x stride + k x holes_kernel - before, if the input has an element there.

    >>> _met(Window(), 5, 3, 3), _met(Window(before=1), 5, 3, 5)
    (9, 13)
    >>> _met(Window(stride=3, holes_left=4), 4, 4, 4)  # a batch of products, each with its own row
    4
    """
    common = gcd(window.stride, window.holes_left)
    period = window.holes_left // common
    farthest = (left - 1) * window.holes_left
    total = 0
    for element in range(kernel):
        offset = window.before - element * window.holes_kernel
        if offset % common:
            continue
        # Places p with p x stride = offset modulo the holes, from the first in the input to the last.
        first = offset // common * pow(window.stride // common, -1, period) % period if period > 1 else 0
        low, high = max(0, -(-offset // window.stride)), min(result - 1, (farthest + offset) // window.stride)
        low += (first - low) % period
        total += max(0, (high - low) // period + 1)
    return total


def _windows(rest: str, number: int) -> Sequence[Window]:
    found = _WINDOW.search(rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}

    def each(name: str, default: int) -> list[int]:
        return [int(size.split("_")[0]) for size in given[name].split("x")] if name in given else [default] * number

    columns = zip(each("stride", 1), each("pad", 0), each("lhs_dilate", 1), each("rhs_dilate", 1), strict=True)
    return [Window(stride=s, before=b, holes_left=left, holes_kernel=k) for s, b, left, k in columns]
