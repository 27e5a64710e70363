"""Functions of tensors that a GPU computes in one pass over memory each, or few.

Operation by operation, PyTorch reads and writes the entire tensor in each: the codes of a tensor took 20 times as long on an H100 as one
pass does. So ``torch.compile`` makes kernels of such a function, for the GPU alone: a CPU has it as it is written. A kernel serves all
sizes that the same widths divide, since the rows of experts are others in each step.

What ``torch.compile`` returns asks in each call whether it was made for such arguments, which takes longer than a small kernel. Here that is
known of arguments that were met before: what its compiler made is called itself.

A kernel computes float32 as the operations do. What is exact stays so: bits, comparisons, casts, single products. Sums over a dim
may be added in another order, and roots and exponentials may differ in their last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.engine_torch.io.private import autocast_of, is_traced, many_shapes, programs_called
from shardwright.engine_torch.io.recomputation import joined

T = TypeVar("T")
_FIRST = RLock()
"""One call at a time finds out what is called in it, and those inside of it."""
_IMAGINED: ContextVar[Callable[..., Any] | None] = ContextVar("imagined", default=None)
_WIDTHS = (128, 16)
"""Elements: kernels have wide loads and stores where all sizes and strides are multiples of 16, and entire blocks of a recipe where 128
divides them."""
_Divided = tuple[tuple[int, int], ...]
"""Dims, each with the first of these widths that divides its size."""
_MOST = 4096
"""The calls that are remembered: those of experts have other sizes in each step."""


def fused(function: Callable[..., T]) -> Callable[..., T]:
    """``function`` of a module, whose first argument is a tensor and which gradients do not flow through. Where no kernel can be
    made, as without a C compiler, PyTorch warns and does one operation after the other. In a program that is compiled, its compiler fuses.

    >>> fused(torch.neg)(torch.ones(2))
    tensor([-1., -1.])
    """
    return function if is_traced() else in_one_pass(function)


@cache
def in_one_pass(function: Callable[..., T]) -> Callable[..., T]:
    """As ``fused``, outside of programs that are compiled."""
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
    """Whether this tensor has values, and they are on a GPU, outside of a program that is compiled."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cuda and not torch.compiler.is_compiling()  # pyright: ignore[reportAttributeAccessIssue]


class _Program(NamedTuple):
    """A call of what PyTorch's compiler made of a graph of operations. ``run``: takes a list of inputs."""

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: Sequence[object]
    outputs: Sequence[object]


class _Call(NamedTuple):
    """What the same arguments have met before. ``run``: of the views; ``shapes``: theirs, and None where an argument is as it is; ``kept``: what the
    identities in the key are of."""

    run: Callable[..., Any]
    shapes: Sequence[Sequence[int] | None]
    kept: Sequence[object]


class _Compiled:
    """A function as kernels. ``made``: for each way to divide its arguments. ``seen``: what it has been called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__qualname__ = function, function.__qualname__
        self.made: dict[tuple[_Divided, ...], Callable[..., Any]] = {}
        self.seen: dict[tuple[object, ...], _Call] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = (autocast_of(arguments[0].device.type), *map(_kind, arguments))
        call = self.seen.get(key)
        with torch.no_grad():
            if call is not None:
                return call.run(*_views(arguments, call.shapes))
            call, result = self._first(arguments)
        if len(self.seen) == _MOST:
            self.seen.clear()
        self.seen[key] = call
        return result

    def _first(self, arguments: Sequence[object]) -> tuple[_Call, Any]:
        divided = tuple(map(_divided, arguments))
        if divided not in self.made:
            # Not before it is needed: it imports the compiler, for seconds.
            self.made[divided] = torch.compile(_of_views(self.function, divided), dynamic=True)
        shapes = [
            _shape(one, of) if isinstance(one, torch.Tensor) else None
            for one, of in zip(arguments, divided, strict=True)
        ]
        views, compiled, called = _views(arguments, shapes), self.made[divided], list[_Program]()
        # The options of a compilation take as long as a call does.
        with _FIRST, many_shapes(), programs_called(lambda *program: called.append(_Program(*program))):
            result = compiled(*views)
        kept = [one for one in arguments if not isinstance(one, torch.Tensor | tuple)]
        return _Call(_itself(called, views, result) or compiled, shapes, kept), result


def _itself(called: Sequence[_Program], views: Sequence[object], result: object) -> Callable[..., Any] | None:
    """The program that was called for a result, as a function of the same views. None where several were, or where something else than the
    views and their sizes went in, or than tensors of the program came out."""
    if len(called) != 1:
        return None
    (program,) = called
    given, made = _places(views), _places(program.outputs)
    inputs = [(given.get(id(one)), one) for one in program.inputs]
    # They are in the key.
    sizes = {size for one in views if isinstance(one, torch.Tensor) for size in (*one.shape, *one.stride())}
    if not all(number is not None or (isinstance(one, int) and one in sizes) for number, one in inputs):
        return None
    leaves, structure = tree_flatten(result)
    if not all(one is None or id(one) in made for one in leaves):
        return None
    inputs = [(number, one if number is None else None) for number, one in inputs]
    run, outputs = program.run, [None if one is None else made[id(one)] for one in leaves]

    def itself(*views: Any) -> Any:
        found = run([one if number is None else views[number] for number, one in inputs])
        return tree_unflatten([None if number is None else found[number] for number in outputs], structure)

    return itself


def _places(values: Sequence[object]) -> dict[int, int]:
    """Where each tensor is, by its identity."""
    return {id(one): number for number, one in enumerate(values) if isinstance(one, torch.Tensor)}


def _views(arguments: Sequence[Any], shapes: Sequence[Sequence[int] | None]) -> list[Any]:
    return [one if shape is None else one.detach().view(shape) for one, shape in zip(arguments, shapes, strict=True)]


def _divided(argument: object) -> _Divided:
    """The dims of a tensor that have such a size; of no other argument."""
    if not isinstance(argument, torch.Tensor):
        return ()
    widths = ((dim, next((one for one in _WIDTHS if size % one == 0), 0)) for dim, size in enumerate(argument.shape))
    return tuple((dim, width) for dim, width in widths if width and argument.shape[dim])


def _shape(x: torch.Tensor, divided: _Divided) -> Sequence[int]:
    """Each of these dims as two, of which the second has as many elements as the width."""
    shape = list(x.shape)
    for dim, width in reversed(divided):
        shape[dim : dim + 1] = shape[dim] // width, width
    return shape


def _of_views(function: Callable[..., T], divided: Sequence[_Divided]) -> Callable[..., T]:
    """The function of such views. A compiler then knows that sizes and strides are multiples, whatever they are. Without it a GPU's
    kernels read and write one element at once."""

    def whole(*views: Any) -> T:
        arguments = list(views)
        for number, dims in enumerate(divided):
            for dim, width in dims:
                # Asking makes it a constant: the compiler takes any size to be another one in the next call.
                if arguments[number].shape[dim + 1] != width:
                    raise AssertionError(
                        f"{function.__name__}: argument {number} has no {width} elements along {dim + 1}"
                    )
                arguments[number] = arguments[number].flatten(dim, dim + 1)
        return function(*arguments)

    # PyTorch counts and searches what it has compiled by the code of a function: each has its own.
    own = whole.__code__.replace(co_name=function.__name__)
    return FunctionType(own, whole.__globals__, function.__name__, None, whole.__closure__)


def _kind(argument: object) -> object:
    """What a compilation may depend on."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return tuple(map(_kind, argument)) if isinstance(argument, tuple) else id(argument)
