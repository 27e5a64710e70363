"""The smaller tensor that an operand of a collective was computed from alone, by a product or a repetition.

It could have been sent instead: keys and values are computed from a latent with a matrix that every device has, and
heads are repeated from fewer heads. A sum of tensors is computed from neither alone, and weights do not count.
"""

from __future__ import annotations

from shardwright.compiled.text.calls import Callers
from shardwright.compiled.text.hlo import Computation, Program
from shardwright.compiled.text.values import Value, made_from

_PRODUCTS = ("dot", "convolution")
_PASS_THROUGH = frozenset(
    {
        *("bitcast", "copy", "copy-start", "copy-done", "convert", "reshape", "transpose", "get-tuple-element"),
        *("fusion", "multiply", "divide", "select", "slice", "pad", "tuple", "parameter", "negate"),
    }
)
_COMPUTED = frozenset({*_PRODUCTS, "reduce", "exponential", "tanh", "logistic", "rsqrt", "sqrt", "compare", "scatter"})
_MOST_STEPS = 24
_MOST_LOOKED_AT = 96


def made_from_bytes(program: Program, callers: Callers, where: Computation, name: str) -> int | None:
    """Bytes on one device of the tensor that another was expanded from; None if it was not expanded from one tensor."""
    one = where.by_name.get(name)
    value = Value(where, one) if one is not None else None
    for _ in range(_MOST_STEPS):
        if value is None:
            return None
        if value.one.op in _PRODUCTS:
            return _multiplied(program, callers, value)
        if value.one.op == "broadcast":
            return _repeated(value)
        if value.one.op not in _PASS_THROUGH:
            return None
        sources = list(made_from(program, callers, value))
        variable = [source for source in sources if source.one.op not in ("broadcast", "constant", "iota")]
        sources = variable or sources
        largest = max((_num_bytes(source) for source in sources), default=0)
        main = [source for source in sources if _num_bytes(source) * 2 > largest]
        value = main[0] if len(main) == 1 else None
    return None


def _multiplied(program: Program, callers: Callers, value: Value) -> int | None:
    """The factor of a product that is not a weight."""
    factors = list(made_from(program, callers, value))
    computed = [factor for factor in factors if _is_computed(program, callers, factor)]
    return _num_bytes(computed[0]) if len(factors) == 2 and len(computed) == 1 else None


def _repeated(value: Value) -> int | None:
    made = value.where.by_name.get(value.one.operands[0])
    return made.arrays[0].num_bytes if made is not None and made.arrays and made.arrays[0].dims else None


def _is_computed(program: Program, callers: Callers, value: Value) -> bool:
    """Whether a value is the result of a computation; a weight is only sliced, cast and gathered."""
    todo, seen = [value], {(value.where.name, value.one.name, value.element)}
    for _ in range(_MOST_LOOKED_AT):
        if not todo:
            return False
        here = todo.pop(0)
        if here.one.op in _COMPUTED:
            return True
        for source in made_from(program, callers, here):
            key = (source.where.name, source.one.name, source.element)
            if key not in seen:
                seen.add(key)
                todo.append(source)
    return True


def _num_bytes(value: Value) -> int:
    arrays = value.one.arrays
    if value.element is not None and value.element < len(arrays):
        return arrays[value.element].num_bytes
    return sum(array.num_bytes for array in arrays)
