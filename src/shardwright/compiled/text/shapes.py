"""Types of values in a compiler's text: one array, or a tuple of types.

| text | what it is |
|---|---|
| `bf16[4,128]{1,0:T(8,128)(2,1)S(1)}` | 4 x 128, dim 1 fastest, in tiles of 8 x 128, in memory space 1 |
| `(f32[2]{0}, /*index=1*/s32[])` | a tuple |
| `((f32[2]{0}), f32[8]{0})` | the result of an `all-gather-start`: its inputs, its output |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

_OF_WIDTH: Mapping[int, tuple[str, ...]] = {
    0: ("token", "opaque"),
    2: ("s2", "u2"),
    4: ("s4", "u4", "f4e2m1fn"),
    8: (
        "pred",
        "s8",
        "u8",
        "f8e3m4",
        "f8e4m3",
        "f8e4m3fn",
        "f8e4m3fnuz",
        "f8e4m3b11fnuz",
        "f8e5m2",
        "f8e5m2fnuz",
        "f8e8m0fnu",
    ),
    16: ("s16", "u16", "f16", "bf16"),
    32: ("s32", "u32", "f32"),
    64: ("s64", "u64", "f64", "c64"),
    128: ("c128",),
}
BITS: Mapping[str, int] = {dtype: bits for bits, dtypes in _OF_WIDTH.items() for dtype in dtypes}
"""Bits of one element; those narrower than a byte are packed."""

_OURS = {"pred": "bool", "bf16": "bfloat16"}
_LONG = (("f", "float"), ("s", "int"), ("u", "uint"), ("c", "complex"))

_TOKEN = re.compile(r"(?P<paren>[()])|(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=?]*)\](?:\{(?P<layout>[^{}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


def our_dtype(name: str) -> str:
    """The core's name of a type.

    >>> our_dtype("f32"), our_dtype("bf16"), our_dtype("s32"), our_dtype("pred"), our_dtype("f8e4m3fn")
    ('float32', 'bfloat16', 'int32', 'bool', 'float8_e4m3fn')
    """
    if name in _OURS:
        return _OURS[name]
    if name.startswith("f") and "e" in name:
        width, rest = name[1:].split("e", 1)
        return f"float{width}_e{rest}"
    for short, long in _LONG:
        if name[0] == short and name[1:].isdigit():
            return f"{long}{name[1:]}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array. ``dtype``: the compiler's name of it. ``layout``: the text in braces after the dims."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without the padding of a layout.

        >>> arrays_of("bf16[4,3]{1,0}")[0].num_bytes, arrays_of("s4[3]")[0].num_bytes
        (24, 2)
        """
        return -(-prod(self.dims) * BITS.get(self.dtype, 0) // 8)

    @property
    def num_bytes_laid_out(self) -> int:
        """Bytes in memory, with its fastest dims padded to full tiles.

        >>> arrays_of("f32[1000,4]{1,0:T(8,128)}")[0].num_bytes_laid_out == 1000 * 128 * 4
        True
        """
        order, _, tiles = self.layout.partition(":")
        tile = _TILE.search(tiles)
        if tile is None or not self.dims:
            return self.num_bytes
        sizes = [int(size) for size in tile[1].split(",")]
        minor_first = [self.dims[int(dim)] for dim in order.split(",")] if order else [*self.dims][::-1]
        minor_first += [1] * (len(sizes) - len(minor_first))
        for position, size in enumerate(reversed(sizes)):
            minor_first[position] = -(-minor_first[position] // size) * size
        return -(-prod(minor_first) * BITS.get(self.dtype, 0) // 8)

    @property
    def space(self) -> int:
        """The number of its memory space; 0 is the device's main memory."""
        found = _SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @property
    def tiled(self) -> bool:
        """Whether its layout has tiles, which only TPU programs have."""
        return "T(" in self.layout


Type = Array | tuple["Type", ...]


@lru_cache(maxsize=4096)
def type_of(text: str) -> Type:
    """A type, tuples as tuples.

    >>> type_of("((f32[2]{0}), f32[8]{0})")
    ((Array(dtype='f32', dims=(2,), layout='0'),), Array(dtype='f32', dims=(8,), layout='0'))
    """
    stack: list[list[Type]] = [[]]
    for token in _TOKEN.finditer(text):
        if token["paren"] == "(":
            stack.append([])
        elif token["paren"] == ")":
            closed = tuple(stack.pop())
            stack[-1].append(closed)
        else:
            stack[-1].append(Array(dtype=token["dtype"], dims=_dims(token["dims"]), layout=token["layout"] or ""))
    return stack[0][0]


def arrays(found: Type) -> Iterator[Array]:
    """Every array of a type, in order."""
    if isinstance(found, Array):
        yield found
    else:
        for part in found:
            yield from arrays(part)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Every array of a type's text, in order, without tokens.

    >>> [array.dims for array in arrays_of("(f32[2,3]{1,0}, token[], /*index=2*/s32[])")]
    [(2, 3), ()]
    """
    return tuple(array for array in arrays(type_of(text)) if array.dtype != "token")


def _dims(text: str) -> tuple[int, ...]:
    """Sizes; for a bounded dynamic dim (`<=8`), its upper bound."""
    return tuple(int(size.lstrip("<=")) for size in text.split(",") if size.lstrip("<=").isdigit())
