"""What a function of arrays does, read off its jaxpr: whether it treats each element alike, and so a stack as the arrays in it; and
what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

ELEMENTWISE = frozenset(
    (
        "abs",
        "add",
        "add_any",
        "and",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "optimization_barrier",
        "or",
        "pow",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    )
)
"""Primitives whose every element follows from the elements at its index. An unknown one is taken for another."""

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "cond"))

SHAPES = frozenset(("shape", "broadcast_dimensions", "sharding", "out_sharding"))
"""Parameters that say a shape, which a stack has of its own."""

Step = tuple[str, str]
"""A primitive, and its constants."""


def treats_stacks_as_layers(function: Callable[..., Any], stacks: Any, layers: Any) -> bool:
    """Whether ``function(*stacks)`` computes, layer by layer, what ``function(*layers)`` does of one layer.

    ``stacks``, ``layers``: arguments of one structure, of shapes and dtypes; the leaves of one have a first dim that those of the
    other may lack. True only if both are the same elementwise operations with the same constants.
    """
    of_stacks, of_layers = (_steps(jax.make_jaxpr(function)(*one)) for one in (stacks, layers))
    return of_stacks is not None and of_stacks == of_layers


def depends_on(function: Callable[[Any], Any], argument: Any) -> bool:
    """Whether a result of ``function(argument)`` may depend on its argument, a shape and a dtype."""
    jaxpr = jax.make_jaxpr(function)(argument).jaxpr
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not isinstance(one, Literal) and one in reached for one in equation.invars):
            reached.update(equation.outvars)
    return any(not isinstance(one, Literal) and one in reached for one in jaxpr.outvars)


def _steps(jaxpr: ClosedJaxpr) -> list[Step] | None:
    """The operations in order; None if one is of several elements of an array."""
    if any(getattr(const, "ndim", 0) for const in jaxpr.consts):
        return None
    found = []
    for equation in _equations(jaxpr.jaxpr):
        if not _is_elementwise(equation):
            return None
        found.append((equation.primitive.name, _constants(equation)))
    return found


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Each equation, those of functions that are called in the place of the call."""
    for equation in jaxpr.eqns:
        inside = [one for value in equation.params.values() for one in _jaxprs(value)]
        if equation.primitive.name in CALLS and inside:
            for one in inside:
                yield from _equations(one)
        else:
            yield equation


def _jaxprs(value: Any) -> list[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    return [one for each in value for one in _jaxprs(each)] if isinstance(value, list | tuple) else []


def _is_elementwise(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "broadcast_in_dim":
        return not _dims(equation.invars[0])
    scalars = not any(_dims(one) for one in (*equation.invars, *equation.outvars))
    return scalars or equation.primitive.name in ELEMENTWISE


def _dims(variable: Any) -> int:
    return len(variable.aval.shape)


def _constants(equation: JaxprEqn) -> str:
    params: Mapping[str, Any] = {key: value for key, value in equation.params.items() if key not in SHAPES}
    return f"{[str(one.val) for one in equation.invars if isinstance(one, Literal)]} {sorted(map(str, params.items()))}"
