"""Which parameter of a function gets which argument."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.interop.torchtitan.program.values import Items, Table


def bound(
    parameters: ast.arguments,
    given: Sequence[Any],
    named: Mapping[str, Any],
    default: Callable[[ast.expr], Any],
) -> dict[str, Any] | None:
    """Parameter names to values, as Python binds them; None where Python would raise a TypeError."""
    places = [*parameters.posonlyargs, *parameters.args]
    values: dict[str, Any] = dict(zip((each.arg for each in places), given, strict=False))
    rest = given[len(places) :]
    if parameters.vararg is not None:
        values[parameters.vararg.arg] = tuple(rest)
    elif rest:
        return None
    more = Table()
    by_name = {each.arg for each in (*parameters.args, *parameters.kwonlyargs)}
    for name, value in named.items():
        if name in values and name in by_name:
            return None
        if name in by_name:
            values[name] = value
        elif parameters.kwarg is not None:
            more[name] = value
        else:
            return None
    if parameters.kwarg is not None:
        values[parameters.kwarg.arg] = more
    defaults = [(each, node) for each, node in zip(places[::-1], parameters.defaults[::-1], strict=False)]
    defaults += [(each, node) for each, node in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if node]
    for each, node in defaults:
        if each.arg not in values:
            values[each.arg] = default(node)
    missing = [each.arg for each in (*places, *parameters.kwonlyargs) if each.arg not in values]
    return None if missing else values


def needed(parameters: ast.arguments) -> list[str]:
    """The parameters that have no default."""
    places = [*parameters.posonlyargs, *parameters.args]
    without = places[: len(places) - len(parameters.defaults)]
    without += [each for each, node in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if node is None]
    return [each.arg for each in without]


def spread(value: Any) -> Sequence[Any] | None:
    """The arguments that ``*value`` passes; None where they are not known."""
    return value if isinstance(value, tuple | Items) and getattr(value, "invalidated", None) is None else None


def spread_named(value: Any) -> Mapping[str, Any] | None:
    """The arguments that ``**value`` passes; None where they are not known."""
    known = isinstance(value, Table) and value.invalidated is None and all(isinstance(key, str) for key in value)
    return value if known else None
