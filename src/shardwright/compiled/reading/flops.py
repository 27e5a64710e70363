"""Floating-point operations of the matrix products in a compiled program: two for each multiplication.

| in the text | multiplications of one execution |
|---|---|
| `dot` | elements of the result x elements of the contracted dims |
| `convolution`, the form of products on TPU | elements of the result x kernel input features x, along each spatial dim, the positions where the kernel meets the input and not its padding or dilation |
| a library call, the form of some products on GPU | as a `dot` |
| cuDNN's product of codes with the scales of blocks | elements of the result x elements of the last dim of an operand |

The products of custom kernels are not in the text.
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
_BLOCK_SCALED = 'custom_call_target="__cudnn$blockScaledDot"'
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


Flops = Mapping[str | None, Fraction]
"""Operations of one device in a step, by component; None: products without a component."""


def read_flops(program: Program, runs: Mapping[str, Execution]) -> Flops | None:
    """The flops of one device in a step; None if a loop with products has an unknown trip count."""
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
    """Operations of one execution of an instruction; 0 if it is not a product."""
    if one.op == "dot":
        contracted = _CONTRACTED.search(one.rest)
    elif one.op == "custom-call" and _LIBRARY.search(one.rest):
        contracted = _LIBRARY_CONTRACTED.search(one.rest)
    elif one.op == "custom-call" and _BLOCK_SCALED in one.rest:
        return 2 * prod(one.arrays[0].dims) * where.by_name[one.operands[0]].arrays[0].dims[-1]
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
    # Batch groups are independent; feature groups are already in the kernel's input features.
    batches = one.number("batch_group_count") or 1
    return left["b"] // batches * kernel["o"] * kernel["i"] * met


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A convolution's window along one spatial dim. ``holes_left``, ``holes_kernel``: dilation of input and kernel."""

    stride: int = 1
    before: int = 0
    holes_left: int = 1
    holes_kernel: int = 1

    def met(self, left: int, kernel: int, result: int) -> int:
        """Pairs of a result position and a kernel element that meet an element of the input."""
        return _met(self, left, kernel, result)


@lru_cache(maxsize=4096)
def _met(window: Window, left: int, kernel: int, result: int) -> int:
    """Position p and kernel element k meet at p x stride + k x holes_kernel - before, if the input has an element there.

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
        # Positions p with p x stride = offset modulo the dilation, from the first in the input to the last.
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
