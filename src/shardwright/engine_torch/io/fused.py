"""Functions of tensors that a GPU computes in one pass over memory each, or few.

Operation by operation, PyTorch reads and writes the entire tensor in each: the codes of a tensor took 20 times as long on an H100 as one
pass does. So ``torch.compile`` makes kernels of such a function, for the GPU alone: a CPU has it as it is written. A kernel serves all
sizes of its operands, since the rows of experts are others in each step.

A kernel computes float32 as the operations do. What is exact stays so: bits, comparisons, casts, single products. Sums over a dim
may be added in another order, and roots and exponentials may differ in their last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

from shardwright.engine_torch.io.private import many_shapes
from shardwright.engine_torch.io.recomputation import joined

T = TypeVar("T")
_IMAGINED: ContextVar[Callable[..., Any] | None] = ContextVar("imagined", default=None)
_WIDE = 16
"""Of sizes, in elements: what Triton needs to know of them."""
_MOST = 4096
"""The calls that are remembered: those of experts have other sizes in each step."""


@cache
def fused(function: Callable[..., T]) -> Callable[..., T]:
    """``function`` of a module, whose first argument is a tensor and which gradients do not flow through. Where no kernel can be
    made, as without a C compiler, PyTorch warns and does one operation after the other.

    >>> fused(torch.neg)(torch.ones(2))
    tensor([-1., -1.])
    """
    compiled = _Compiled(function)

    @wraps(function)
    def whole(*arguments: Any) -> T:
        imagine = _IMAGINED.get()
        if imagine is not None:
            return joined(partial(imagine, function), *arguments)
        return joined(compiled, *arguments) if is_fused(arguments[0]) else function(*arguments)

    return whole


@contextmanager
def imagined_as(imagine: Callable[..., Any]) -> Iterator[None]:
    """Inside of it ``imagine(function, *arguments)`` has the result of every function here, as where tensors have no values."""
    before = _IMAGINED.set(imagine)
    try:
        yield
    finally:
        _IMAGINED.reset(before)


def is_fused(x: object) -> bool:
    """Whether this tensor has values, and they are on a GPU. In a program that is compiled, its compiler fuses."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cuda and not torch.compiler.is_compiling()  # pyright: ignore[reportAttributeAccessIssue]


class _Compiled:
    """A function as kernels. ``seen``: what it has been called with; the values are what the identities in the keys are of."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__qualname__ = function, function.__qualname__
        self.compiled: Callable[..., Any] | None = None
        self.seen: dict[tuple[object, ...], Sequence[object]] = {}

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad():
            plain = [one.detach() if isinstance(one, torch.Tensor) else one for one in arguments]
            key = tuple(map(_kind, plain))
            if key in self.seen:
                assert self.compiled is not None
                return self.compiled(*plain)
            # The options of a compilation take as long as a call does.
            with many_shapes():
                # Not before it is needed: it imports the compiler, for seconds.
                self.compiled = self.compiled or torch.compile(_of_multiples(self.function), dynamic=True)
                result = self.compiled(*plain)
            if len(self.seen) == _MOST:
                self.seen.clear()
            self.seen[key] = [one for one in plain if not isinstance(one, torch.Tensor | tuple)]
            return result


def _of_multiples(function: Callable[..., T]) -> Callable[..., T]:
    """The same, of which the compiler knows for each size of the first argument whether ``_WIDE`` divides it. Where it does, a kernel reads
    and writes 16 bytes at once in place of one element: it took a half to a third of the time on an H200."""

    def whole(x: torch.Tensor, *others: Any) -> T:
        for size in (*x.shape, x.numel()):
            # Asking is enough: what is answered while a function is traced holds for all of its calls.
            if size % _WIDE:
                continue
        return function(x, *others)

    # PyTorch counts and searches what it has compiled by the code of a function: each has its own.
    own = whole.__code__.replace(co_name=function.__name__)
    return FunctionType(own, whole.__globals__, function.__name__, None, whole.__closure__)


def _kind(argument: object) -> object:
    """What a compilation may depend on."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return tuple(map(_kind, argument)) if isinstance(argument, tuple) else id(argument)
