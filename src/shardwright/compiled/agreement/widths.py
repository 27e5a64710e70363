"""The dtype of a plan's collective, and the widths of dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardwright.core.model.precision import sent_dtype, summed_dtype
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.resolution.request import FLOATS

_BITS = re.compile(r"\d+")


def width(dtype: str) -> int:
    """Bytes of one element, at least 1.

    >>> width("bfloat16"), width("float32"), width("bool"), width("float8_e4m3fn")
    (2, 4, 1, 1)
    """
    bits = _BITS.search(dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def is_integer(dtype: str) -> bool:
    """Whether a dtype is an integer or a boolean.

    >>> is_integer("int32"), is_integer("bool"), is_integer("bfloat16")
    (True, True, False)
    """
    return not dtype.startswith(("float", "bfloat"))


def widest_float(dtypes: Iterable[str]) -> str | None:
    """The widest floating-point dtype of several; None if there is none.

    >>> widest_float(["int32", "bfloat16", "float32"]), widest_float(["int32"])
    ('float32', None)
    """
    return max((dtype for dtype in dtypes if not is_integer(dtype)), key=width, default=None)


def planned_dtype(plan: Plan, one: PlannedCollective) -> str:
    """The dtype in which a plan's collective sends.

    That of weights is defined by the core: see ``core/model/precision.py``.
    """
    if one.dtype is not None:
        return one.dtype
    tensor = plan.by_name[one.tensors[0]]
    if tensor.kind == "activation" or tensor.dtype not in FLOATS:
        return tensor.dtype
    weight, computation = plan.request.table.weight(tensor.name), plan.request.dtype
    if one.phase == "update" and one.kind == "all-gather":
        # Of the weights at rest: each device has updated a part.
        return tensor.dtype
    if one.phase in ("backward", "update"):
        return summed_dtype(weight, plan.request.summed_in, computation)
    return sent_dtype(weight, tensor.dtype, computation)
