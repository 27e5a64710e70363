"""What a layer keeps for its backward pass: its activations have the names of the model's table, and those of the plan are kept.

Autograd saves tensors for the backward pass. Of those that a layer made, a tensor is kept only where the plan keeps the activation, on the
device or on the host. The first that is missing makes the layer run again. In that run

| an operation whose result | is |
|---|---|
| is kept | not computed: the result is what was kept |
| is missing, or is needed to make what is missing | computed |
| is neither | not computed: the result is memory without values |

``torch.utils.checkpoint`` chooses by operation and not by result, and computes all else again that precedes what is needed.

Collectives are in functions that are one operation (``one_operation``). Numbers that Python reads of tensors are remembered (``remembered``). What is written into
memory from outside of the layer is written once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardwright.core.policies.policy import INPUT
from shardwright.core.policies.runs import Run
from shardwright.engine_torch.io.host import from_host, to_host
from shardwright.engine_torch.io.operations import Joined, Operation, Shape, on_its_own, written
from shardwright.engine_torch.io.private import is_traced, storage_key, storage_mark, without_modes

P = ParamSpec("P")
T = TypeVar("T")


def recomputed(layer: Callable[[torch.Tensor], Any], run: Run, x: torch.Tensor) -> Any:
    """``layer(x)``, whose backward pass has what the run saves, and makes all else again. ``x``: the layer's input."""
    return _Call(layer, run).forward(x)


def named(x: torch.Tensor, name: str) -> torch.Tensor:
    """The activation ``name`` of the layer that is computed."""
    now = _now()
    return x if now is None else now.named(x, name)


def one_operation(send: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """The function, with its collectives one operation: in the second run all ranks repeat it, or none."""

    @wraps(send)
    def as_one(*arguments: P.args, **options: P.kwargs) -> torch.Tensor:
        return sent(lambda: send(*arguments, **options))

    return as_one


def sent(send: Callable[[], torch.Tensor], *, always: bool = False) -> torch.Tensor:
    """``send()`` as one operation. ``always``: it is repeated whether its result is needed or not."""
    now = _now()
    return send() if now is None else now.one_operation(send, always=always)


def joined(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` as one operation, which writes none of its arguments."""
    now = _now()
    return function(*arguments) if now is None else now.joined(Joined(function), arguments)


def remembered(read: Callable[[], T]) -> T:
    """What Python reads of tensors: the same where the layer is computed again."""
    now = _now()
    return read() if now is None else now.remembered(read)


def _now() -> _Recording | _Replaying | None:
    # No layer of ours is in a program that is compiled.
    return None if is_traced() else _NOW.get()


class _Saved:
    """What autograd has in place of a tensor. ``value``: None while it is on the host or missing."""

    __slots__ = ("__weakref__", "call", "shape", "value")

    def __init__(self, call: _Call, shape: Shape | None, value: torch.Tensor | None) -> None:
        self.call, self.shape, self.value = call, shape, value


class _DoneError(Exception):
    """All that was missing has been made."""


class _Call:
    """A layer with one microbatch. ``operations``: in their order; ``packed``: what autograd saves, in its order; ``values``: what Python
    read. By storage: ``arrays``: what is kept on the device; ``on_host``: with its shape on the device; ``made``: what the layer made, by marks
    that keep a key from being used again. By numbers: ``missing``: of what autograd saves; ``needed``: of operations; ``beside``: results of an
    operation that has several, until it is known whether one of them is kept."""

    def __init__(self, layer: Callable[[torch.Tensor], Any], run: Run) -> None:
        self.layer, self.saved, self.hosted = layer, run.saved, run.hosted
        self.operations: list[Operation] = []
        self.packed: list[weakref.ref[_Saved]] = []
        self.values: list[Any] = []
        self.arrays: dict[int, torch.Tensor] = {}
        self.on_host: dict[int, tuple[torch.Tensor, Shape]] = {}
        self.made: dict[int, object] = {}
        self.missing: set[int] = set()
        self.needed: set[int] = set()
        self.beside: dict[int, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> Any:
        self.needs_gradient = x.requires_grad
        if INPUT in self.hosted:
            x = on_its_own(x)
            self.keep(x, INPUT)
        else:
            self.arrays[storage_key(x.untyped_storage())] = x.detach()
        self.input = Shape.of(x)
        with _Recording(self) as recording, saved_tensors_hooks(recording.pack, _unpack):
            result = self.layer(x)
        self._decide()
        return result

    def keep(self, x: torch.Tensor, name: str) -> None:
        shape, x = Shape.of(x), x.detach()
        if name in self.hosted:
            self.made[shape.storage] = storage_mark(x.untyped_storage())
            self.on_host[shape.storage] = to_host(x), shape
        else:
            self.arrays[shape.storage] = x

    def is_kept(self, storage: int) -> bool:
        return storage in self.arrays or storage in self.on_host

    def array(self, shape: Shape) -> torch.Tensor:
        """A tensor of a storage that is kept."""
        if shape.storage not in self.arrays:
            host, whole = self.on_host[shape.storage]
            self.arrays[shape.storage] = from_host(host, whole.device)
        return shape.of_array(self.arrays[shape.storage])

    def _decide(self) -> None:
        """Which operations are needed for what is missing."""
        for number, results in self.beside.items():
            if any(map(self.is_kept, self.operations[number].writes)):
                self.arrays |= {storage_key(x.untyped_storage()): x for x in results}
        needed: set[int] = set()
        for number, reference in enumerate(self.packed):
            saved = reference()
            if saved is None or saved.value is not None or saved.shape is None:
                continue
            if saved.shape.storage in self.arrays:
                saved.value = saved.shape.of_array(self.arrays[saved.shape.storage])
            elif saved.shape.storage not in self.on_host:
                self.missing.add(number)
                needed.add(saved.shape.storage)
        for number, one in reversed(list(enumerate(self.operations))):
            if one.always or any(key in needed and not self.is_kept(key) for key in one.writes):
                self.needed.add(number)
                needed |= one.reads
        self.made, self.beside = {}, {}
        if not self.missing:
            self._forget()

    def fill(self, saved: _Saved) -> None:
        assert saved.shape is not None
        if saved.shape.storage in self.on_host:
            saved.value = self.array(saved.shape)
        else:
            assert self.operations, "what this layer kept for its backward pass has been used"
            self._run_again()
        assert saved.value is not None

    def _run_again(self) -> None:
        x = self.array(self.input)
        again = _Replaying(self)
        with suppress(_DoneError), torch.enable_grad(), again, saved_tensors_hooks(again.pack, _unpack):
            self.layer(x.requires_grad_(self.needs_gradient))
        self._forget()

    def _forget(self) -> None:
        """What only another run would need."""
        self.operations, self.values, self.missing, self.needed = [], [], set(), set()
        self.arrays = {key: array for key, array in self.arrays.items() if key in self.on_host}


class _Mode(TorchDispatchMode):
    """A run of a layer: every operation comes here."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        self._passing = False
        self._before: Token[_Recording | _Replaying | None] | None = None

    def __enter__(self):
        self._before = _NOW.set(self)  # pyright: ignore[reportArgumentType]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        assert self._before is not None
        _NOW.reset(self._before)
        super().__exit__(*error)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Operations inside are as they are without this mode."""
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            # It is dispatched again, as operations on the local shards.
            return NotImplemented
        if self._passing or func.namespace == "prim":
            # The device of a tensor without values is such an operation.
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})

    def joined(self, function: Joined, arguments: tuple[Any, ...]) -> Any:
        with without_modes():
            return function(*arguments) if self._passing else self.run(function, arguments, {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class _Recording(_Mode):
    """The forward pass."""

    _inside: tuple[set[int], set[int]] | None = None
    """What the operation that is under way has read and written."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        places: dict[int, int] = {}
        for number, one in enumerate(given):
            places.setdefault(storage_key(one.untyped_storage()), number)
        leaves, structure = tree_flatten(made)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        new = [one for one in tensors if storage_key(one.untyped_storage()) not in places]
        for one in new:
            self.call.made[storage_key(one.untyped_storage())] = storage_mark(one.untyped_storage())
        writes = {storage_key(one.untyped_storage()) for one in (*new, *written(func, args, kwargs))}
        if self._inside is not None:
            self._inside[0].update(places)
            self._inside[1].update(writes)
            return made
        if len(new) > 1:
            self.call.beside[len(self.call.operations)] = [one.detach() for one in new]
        self.call.operations.append(
            Operation(
                name=str(func),
                reads=frozenset(places),
                writes=frozenset(writes),
                results=tuple(
                    Shape.of(one, places.get(storage_key(one.untyped_storage())))
                    if isinstance(one, torch.Tensor)
                    else one
                    for one in leaves
                ),
                structure=structure,
            )
        )
        return made

    def one_operation(self, send: Callable[[], torch.Tensor], *, always: bool) -> torch.Tensor:
        if self._inside is not None:
            return send()
        self._inside = set(), set()
        try:
            result = send()
            reads, writes = map(frozenset, self._inside)
        finally:
            self._inside = None
        results = (Shape.of(result),)
        self.call.operations.append(Operation(name="sent", reads=reads, writes=writes, results=results, always=always))
        return result

    def remembered(self, read: Callable[[], T]) -> T:
        with self.passing():
            value = read()
        self.call.values.append(value)
        return value

    def named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name in self.call.saved or name in self.call.hosted:
            x = on_its_own(x)
            with self.passing():
                self.call.keep(x, name)
        return x

    def pack(self, x: torch.Tensor) -> _Saved:
        if isinstance(x, DTensor):
            found = _Saved(self.call, None, x)
        else:
            with self.passing():
                shape = Shape.of(x)
                # What the layer did not make is there anyhow: weights, masks, and its input.
                found = _Saved(self.call, shape, None if shape.storage in self.call.made else x.detach())
        self.call.packed.append(weakref.ref(found))
        return found


class _Replaying(_Mode):
    """The same program in the backward pass."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call)
        self._operations, self._values = iter(enumerate(call.operations)), iter(call.values)
        self._packed, self._last = 0, max(call.missing)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        planned, repeats = self._next(str(func))
        if repeats:
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return tree_unflatten([self._result(one, given) for one in planned.results], planned.structure)

    def _next(self, name: str) -> tuple[Operation, bool]:
        """The next operation, and whether it is repeated."""
        number, planned = next(self._operations)
        assert planned.name == name, f"the layer was {planned.name} and is {name}"
        return planned, number in self.call.needed or planned.is_view

    def _result(self, one: Any, given: list[torch.Tensor]) -> Any:
        if not isinstance(one, Shape):
            return one
        if one.position is not None:
            return given[one.position]
        return self.call.array(one) if self.call.is_kept(one.storage) else one.without_values()

    def one_operation(self, send: Callable[[], torch.Tensor], *, always: bool) -> torch.Tensor:
        del always
        if self._passing:
            return send()
        planned, repeats = self._next("sent")
        with self.passing():
            return send() if repeats else self._result(planned.results[0], [])

    def remembered(self, read: Callable[[], T]) -> T:
        del read
        return next(self._values)

    def named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return on_its_own(x) if name in self.call.saved or name in self.call.hosted else x

    def pack(self, x: torch.Tensor) -> None:
        number = self._packed
        self._packed += 1
        if number in self.call.missing and (saved := self.call.packed[number]()) is not None:
            with self.passing():
                saved.value = x.detach()
        if number == self._last:
            raise _DoneError


_NOW: ContextVar[_Recording | _Replaying | None] = ContextVar("recomputation", default=None)


def _unpack(saved: _Saved) -> torch.Tensor:
    if saved.value is None:
        saved.call.fill(saved)
    assert saved.value is not None
    return saved.value
