"""Which type a collective of a plan travels in, and how wide the types of a program are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwright.core.plan import Plan, PlannedCollective
from shardwright.core.request import FLOATS

NAMES: Mapping[str, str] = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "s64": "int64",
    "u64": "uint64",
    "s32": "int32",
    "u32": "uint32",
    "s16": "int16",
    "u16": "uint16",
    "s8": "int8",
    "u8": "uint8",
    "pred": "bool",
}
"""Our names of the types that a compiler's text calls otherwise."""

WIDTHS: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element."""


def width(dtype: str) -> int:
    """Bytes of one element, by our name of the type or the compiler's.

    >>> width("bf16"), width("float32")
    (2, 4)
    """
    return WIDTHS[NAMES.get(dtype, dtype)]


def is_integer(dtype: str) -> bool:
    """Whether a type holds no fractions.

    >>> is_integer("s32"), is_integer("bool"), is_integer("bf16")
    (True, True, False)
    """
    return not NAMES.get(dtype, dtype).startswith(("float", "bfloat"))


def widest_float(dtypes: Iterable[str]) -> str | None:
    """The widest of the floating-point types among some, by our name; None where there is none.

    >>> widest_float(["s32", "bf16", "f32"]), widest_float(["s32"])
    ('float32', None)
    """
    floats = [NAMES.get(dtype, dtype) for dtype in dtypes if not is_integer(dtype)]
    return max(floats, key=width, default=None)


def planned_dtype(plan: Plan, one: PlannedCollective) -> str:
    """The type that a plan's collective travels in: a weight's as it is used, its gradient's as it rests."""
    tensor = plan.by_name[one.tensors[0]]
    if tensor.kind == "activation" or tensor.dtype not in FLOATS or one.phase in ("backward", "update"):
        return tensor.dtype
    return plan.request.table.weight(tensor.name).in_use_dtype or plan.request.dtype
