"""A part of a model while its program is written: an operation is a call on values of the part's component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from shardwright.core.findings.errors import InputError
from shardwright.core.model.table import Initializer
from shardwright.core.program.dims import BY_BATCH, LETTERS, TOKENS, read_dims, read_product, shardable
from shardwright.core.program.primitives import (
    Add,
    Attend,
    Bias,
    Cap,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Join,
    Loss,
    Norm,
    Primitive,
    Product,
    Rotate,
    Route,
    Scale,
    Split,
    Take,
)
from shardwright.core.program.program import Value, WeightUse

ONES, ZEROS = Initializer(kind="ones"), Initializer(kind="zeros")


class Recorder(Protocol):
    """What a part needs of the program that it is written in."""

    sizes: dict[str, int]
    initializer_stddev: float

    def size_of(self, dim: str, sizes: Mapping[str, int]) -> int:
        """Elements along a dim."""
        ...

    def record(self, does: Primitive, inputs: Sequence[Value], outputs: Sequence[Value], *weights: WeightUse) -> Value:
        """Adds a step; returns its first output."""
        ...


class Part:
    """A part of a model: its operations. Each takes values of its component, and names what it makes ``part.name``."""

    def __init__(self, draft: Recorder, name: str, component: str) -> None:
        self._draft, self._name, self._component = draft, name, component

    def take(self, x: Value, name: str = "", dims: str = "") -> Value:
        """The same value here. ``dims``: where what its tokens are for changes, as from ``B L H D`` to ``B T H D``."""
        target = read_dims(dims) if dims else x.dims
        kind, renamed = _change_of(x, target)
        if not x.row:
            raise InputError(f"{x} is taken to {self._component}, and has no name. Give it one.")
        if x.component == self._component and target == x.dims:
            raise InputError(f"{x} is of {x.component} already, and has these dims. Use it as it is.")
        return self._draft.record(Take(kind=kind, renamed=renamed), [x], [self._new(name, target, x.sizes, x.dtype)])

    def product(
        self,
        dims: str,
        x: Value,
        weight: str,
        name: str = "",
        *,
        dtype: str | None = None,
        weight_dtype: str | None = None,
        **sizes: int,
    ) -> Value:
        """``x`` times a weight. ``sizes``: of dims, by their letters, if not the program's."""
        spec = read_product(dims)
        self._has(x, spec.input, f"product '{dims}'")
        sizes = {**x.sizes, **sizes}
        torch_dims = (*((dim,) for dim in spec.batched), spec.outputs, spec.contracted)
        use = self._weight(weight, spec.weight, sizes, torch_dims, in_use_dtype=weight_dtype)
        own = {dim: size for dim, size in sizes.items() if dim in spec.output and size != self._draft.sizes.get(dim)}
        return self._draft.record(Product(dims=spec), [x], [self._new(name, spec.output, own, dtype)], use)

    def norm(self, x: Value, scale: str, name: str = "", *, eps: float) -> Value:
        """RMS norm over the last dim, times a weight."""
        self._numbers(x)
        if LETTERS[x.dims[-1]] in shardable(self._component):
            raise InputError(
                f"a norm over {LETTERS[x.dims[-1]]}, which layouts shard in {self._component}: its mean is of one shard."
            )
        size = self._draft.size_of(x.dims[-1], x.sizes)
        use = WeightUse(
            name=f"{self._name}.{scale}",
            component=self._component,
            logical_axes=("norm",),
            shape=(size,),
            initializer=ONES,
            in_use_dtype="float32",
        )
        return self._draft.record(Norm(eps=eps), [x], [self._like(x, name)], use)

    def bias(self, x: Value, weight: str, dims: str, name: str = "") -> Value:
        """The sum with a weight of some of its dims."""
        self._here(x)
        missing = [dim for dim in read_dims(dims) if dim not in x.dims]
        if missing or set(dims.split()) & BY_BATCH:
            raise InputError(
                f"a bias with {dims} is added to {x}, of {' '.join(x.dims)}. Give dims of it that no batch gives."
            )
        use = self._weight(weight, read_dims(dims), x.sizes, None, initializer=ZEROS)
        return self._draft.record(Bias(dims=read_dims(dims)), [x], [self._like(x, name)], use)

    def rotate(self, x: Value, positions: Value, name: str = "", *, rope: Any) -> Value:
        """Rotary embedding of the last dim."""
        self._here(x, positions)
        if self._draft.size_of(x.dims[-1], x.sizes) % 2:
            raise InputError(
                f"{x} has {self._draft.size_of(x.dims[-1], x.sizes)} elements to rotate. Pairs are rotated: give it two more or one less."
            )
        if positions.is_float or positions.dims != x.dims[: len(positions.dims)]:
            raise InputError(
                f"{x} is {' '.join(x.dims)}, and its positions are {positions}. Give the positions of its tokens."
            )
        return self._draft.record(Rotate(rope=rope), [x, positions], [self._like(x, name)])

    def gate(
        self, gate: Value, up: Value, name: str, *, function: Literal["silu"] = "silu", kept: bool = True
    ) -> Value:
        """``function(gate) * up``. ``kept``: whether an engine has it as an array, which a policy may keep."""
        self._alike(gate, up, "gate")
        hidden = replace(self._like(gate, name), kept=kept)
        return self._draft.record(Gate(function=function), [gate, up], [hidden])

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        name: str,
        *,
        masks: Sequence[Value],
        scale: float,
        window: int | None = None,
    ) -> Value:
        """Attention of queries ``B T H D`` to keys and values ``B S K D`` or ``B S H D``. ``masks``: positions and segments of both."""
        self._here(q, k, v, *masks)
        if "T" not in q.dims or "S" not in k.dims or "S" not in v.dims:
            raise InputError(
                f"attention of {q} ({' '.join(q.dims)}) to {k} ({' '.join(k.dims)}): take queries to T, keys and values to S."
            )
        if q.dims != ("B", "T", "H", "D") or k.dims[2:] not in (("K", "D"), ("H", "D")) or k.dims[:3] != v.dims[:3]:
            raise InputError(
                f"attention: queries {' '.join(q.dims)}, keys {' '.join(k.dims)}, values {' '.join(v.dims)}. Needed: B T H D, B S K D and "
                "B S K D, or heads H for all."
            )
        num_heads = [self._draft.size_of(value.dims[2], value.sizes) for value in (q, k)]
        if num_heads[0] % num_heads[1]:
            raise InputError(
                f"{num_heads[0]} query heads share {num_heads[1]} KV heads. Their number is a multiple of it."
            )
        size = {self._draft.size_of("D", value.sizes) for value in (q, k)}
        if len(size) > 1:
            raise InputError(
                f"queries and keys have {' and '.join(map(str, sorted(size)))} elements. A score is a product of both."
            )
        if [mask.dims for mask in masks] != [("B", "T"), ("B", "T"), ("B", "S"), ("B", "S")]:
            raise InputError("the masks of attention are positions and segments of queries (B T), then of keys (B S).")
        width = v.dims[-1]
        out = self._new(name, (*q.dims[:-1], width), {dim: size for dim, size in v.sizes.items() if dim == width})
        return self._draft.record(Attend(scale=scale, window=window), [q, k, v, *masks], [out])

    def route(
        self, scores: Value, valid: Value, names: tuple[str, str], *, bias: str = "", **of: Any
    ) -> tuple[Value, Value]:
        """The experts of each valid token and their weights, under these ``names``. ``bias``: a frozen weight that is added for the
        selection alone."""
        self._here(scores, valid)
        does = Route(**of)
        num = self._draft.size_of("Z", scores.sizes)
        if does.top_k > num:
            raise InputError(f"{does.top_k} of {num} experts are chosen for a token. Choose {num} at most.")
        dims = (*scores.dims[:-1], "A")
        experts, chosen = self._new(names[0], dims, {}, "int32"), self._new(names[1], dims, {}, scores.dtype)
        weights = []
        if bias:
            weights = [self._weight(bias, ("Z",), {}, None, initializer=ZEROS, in_use_dtype="float32", frozen=True)]
        self._draft.record(does, [scores, valid], [experts, chosen], *weights)
        return experts, chosen

    def dispatch(self, x: Value, experts: Value, name: str) -> Value:
        """A row for each of a token's experts."""
        self._here(x, experts)
        if experts.is_float or experts.dims != (*x.dims[:-1], "A"):
            raise InputError(
                f"{x} is dispatched by {experts}. Give the experts of its tokens: {' '.join(x.dims[:-1])} A."
            )
        return self._draft.record(Dispatch(), [x, experts], [self._new(name, (*experts.dims, x.dims[-1]), x.sizes)])

    def combine(self, rows: Value, weights: Value, experts: Value, name: str) -> Value:
        """The sum of a token's rows, each times its weight."""
        self._here(rows, weights, experts)
        if not weights.is_float or experts.is_float or {weights.dims, experts.dims} != {rows.dims[:-1]}:
            raise InputError(
                f"{rows} is combined by {weights} and {experts}. Give weights and experts of {' '.join(rows.dims[:-1])}."
            )
        dims = tuple(dim for dim in rows.dims if dim != "A")
        return self._draft.record(Combine(), [rows, weights, experts], [self._new(name, dims, rows.sizes)])

    def embed(self, ids: Value, weight: str, name: str) -> Value:
        """The row of each id."""
        self._here(ids)
        if ids.is_float:
            raise InputError(f"{ids} is embedded, and has no whole numbers. Give the ids of tokens.")
        use = self._weight(weight, ("V", "M"), {}, (("V",), ("M",)))
        return self._draft.record(Embed(), [ids], [self._new(name, (*ids.dims, "M"), {})], use)

    def loss(self, scores: Value, targets: Value, valid: Value) -> None:
        """The cross-entropy, which ends a program."""
        self._here(scores, targets, valid)
        self._draft.record(Loss(), [scores, targets, valid], [Value(name="", component=self._component, dims=())])

    def add(self, x: Value, *others: Value, name: str = "") -> Value:
        """The sum of values, which lies as the first; those of other parts are taken here for it."""
        self._here(x)
        summands = [x]
        for other in others:
            if other.dims != x.dims or other.sizes != x.sizes:
                raise InputError(
                    f"{x} ({' '.join(x.dims)}) plus {other} ({' '.join(other.dims)}). Both need the same dims."
                )
            if other.component != self._component:
                taken = Value(name="", component=self._component, dims=x.dims, row=x.row, sizes=x.sizes, dtype=x.dtype)
                other = self._draft.record(Take(kind="stream", renamed={}), [other], [taken])
            summands.append(other)
        if len(summands) < 2:
            raise InputError(f"{x} is added to nothing. Give a second value.")
        return self._draft.record(Add(), summands, [self._like(x, name, row=x.row)])

    def scale(self, x: Value, factor: float, name: str = "") -> Value:
        """A value times a constant."""
        self._here(x)
        return self._draft.record(Scale(factor=factor), [x], [self._like(x, name)])

    def cap(self, x: Value, limit: float, name: str = "") -> Value:
        """A value between ``-limit`` and ``limit``."""
        self._here(x)
        return self._draft.record(Cap(limit=limit), [x], [self._like(x, name)])

    def split(self, x: Value, **widths: int) -> list[Value]:
        """Consecutive runs of the last dim, each under the letter and of the width that it is given."""
        self._here(x)
        size = self._draft.size_of(x.dims[-1], x.sizes)
        if sum(widths.values()) != size:
            raise InputError(
                f"{x} has {size} elements, and is split into {' + '.join(map(str, widths.values()))} = {sum(widths.values())}."
            )
        own = {dim: number for dim, number in x.sizes.items() if dim != x.dims[-1]}
        outputs = [self._new("", (*x.dims[:-1], *read_dims(dim)), {**own, dim: width}) for dim, width in widths.items()]
        self._draft.record(Split(widths=tuple(widths.values())), [x], outputs)
        return outputs

    def join(self, dims: str, *parts: Value, name: str = "", like: Value | None = None) -> Value:
        """Values one after the other along their last dims. One without heads is that of all heads. ``like``: a value that was split, as
        which they lie together."""
        self._here(*parts)
        target = read_dims(dims)
        for part in parts:
            if tuple(dim for dim in part.dims[:-1]) not in (
                target[:-1],
                tuple(dim for dim in target[:-1] if dim != "H"),
            ):
                raise InputError(f"{part} ({' '.join(part.dims)}) is no part of {dims}.")
        width = sum(self._draft.size_of(part.dims[-1], part.sizes) for part in parts)
        if width != self._draft.sizes.get(target[-1]):
            raise InputError(
                f"'{dims}': the parts have {width} elements together, and {target[-1]} is {self._draft.sizes.get(target[-1])}."
            )
        row = "" if like is None else like.row
        value = Value(name=self._full(name), component=self._component, dims=target, row=row or self._full(name))
        return self._draft.record(Join(), parts, [value])

    def named(self, x: Value, name: str) -> Value:
        """A value under a name, by which a policy may keep it."""
        self._here(x)
        return self._draft.record(Join(), [x], [self._new(name, x.dims, x.sizes, x.dtype)])

    def _full(self, name: str) -> str:
        return f"{self._name}.{name}" if name else ""

    def _new(self, name: str, dims: tuple[str, ...], sizes: Mapping[str, int], dtype: str | None = None) -> Value:
        name = self._full(name)
        return Value(name=name, component=self._component, dims=dims, row=name, sizes=dict(sizes), dtype=dtype)

    def _like(self, x: Value, name: str, row: str = "") -> Value:
        """The result of an operation on each element. ``row``: under which it lies; none: its own if it has a name, else its input's."""
        full = self._full(name)
        return Value(
            name=full, component=self._component, dims=x.dims, row=row or full or x.row, sizes=x.sizes, dtype=x.dtype
        )

    def _weight(
        self,
        name: str,
        dims: tuple[str, ...],
        sizes: Mapping[str, int],
        torch_dims: tuple[tuple[str, ...], ...] | None,
        *,
        initializer: Initializer | None = None,
        in_use_dtype: str | None = None,
        frozen: bool = False,
    ) -> WeightUse:
        axes = tuple(LETTERS[dim] for dim in dims)
        merged = None if torch_dims is None else tuple(tuple(LETTERS[dim] for dim in dims) for dims in torch_dims)
        return WeightUse(
            name=f"{self._name}.{name}" if "." not in name else name,
            component=self._component,
            logical_axes=axes,
            shape=tuple(self._draft.size_of(dim, sizes) for dim in dims),
            initializer=initializer or Initializer(kind="normal", stddev=self._draft.initializer_stddev),
            torch_dims=merged,
            in_use_dtype=in_use_dtype,
            frozen=frozen,
        )

    def _numbers(self, *values: Value) -> None:
        """Refuses values that have no cotangent."""
        self._here(*values)
        for value in values:
            if not value.is_float:
                raise InputError(f"{value} has whole numbers of a batch. Give a value that is computed.")

    def _here(self, *values: Value) -> None:
        for value in values:
            if value.component != self._component:
                raise InputError(
                    f"{self._name} uses {value}, which is of {value.component}. Take it into {self._component} first."
                )

    def _has(self, x: Value, dims: tuple[str, ...], where: str) -> None:
        self._numbers(x)
        if x.dims != dims:
            raise InputError(f"{where}: its input is {x}, which has dims {' '.join(x.dims)}.")

    def _alike(self, x: Value, y: Value, where: str) -> None:
        self._numbers(x, y)
        if (x.dims, x.sizes) != (y.dims, y.sizes):
            raise InputError(
                f"{where}: {x} has dims {' '.join(x.dims)} and {y} has {' '.join(y.dims)}. Both need the same."
            )


def _change_of(x: Value, target: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """The kind of a move, and what is renamed in it."""
    exchanged = ("X" in x.dims) != ("X" in target)
    free = TOKENS | ({"A", "X", "C"} if exchanged else frozenset())
    kept, needed = (tuple(dim for dim in dims if dim not in free) for dims in (x.dims, target))
    if kept != needed or ("X" in target and "C" not in target) or len(_tokens_of(x.dims)) != len(_tokens_of(target)):
        raise InputError(
            f"{x} has dims {' '.join(x.dims)}, and is taken as {' '.join(target)}. Only what its tokens are for may change: L, T, S, or "
            "groups G of U."
        )
    if exchanged:
        return ("dispatch" if "X" in target else "combine"), {}
    (source,), (new,) = _tokens_of(x.dims), _tokens_of(target)
    renamed = {} if source == new else {LETTERS[source]: LETTERS[new]}
    attended = {source, new} & {"T", "S"} if source != new and x.is_float else set()
    return ("keys" if "S" in attended else "queries" if "T" in attended else "stream"), renamed


def _tokens_of(dims: tuple[str, ...]) -> tuple[str, ...]:
    """The dims of a row's tokens: groups stand for their tokens too, if these are there or in slots."""
    return tuple(dim for dim in dims if dim in "LTS" or (dim == "G" and {"U", "C"} & {*dims}))
