"""Operators and methods on literal values. Every result has a bounded size."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.interop.torchtitan.program.values import Items, Table

MAX_INTEGER = 10**30
MAX_LENGTH = 100_000
PLAIN = (int, float, str, bool, type(None))

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": len,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "abs": abs,
    "sum": sum,
    "round": round,
    "range": lambda *bounds: Items(_short(range(*bounds))),
    "list": lambda *given: Items(*given),
    "tuple": lambda *given: tuple(*given),
    "dict": lambda *given, **more: Table(*given, **more),
    "sorted": lambda *given: Items(sorted(*given)),
    "reversed": lambda given: Items(reversed(given)),
    "zip": lambda *given, **more: Items(zip(*given, **more)),  # noqa: B905
    "enumerate": lambda *given: Items(enumerate(*given)),
    "any": any,
    "all": all,
}
METHODS: Mapping[type, tuple[str, ...]] = {
    Items: ("append", "extend", "insert", "pop", "remove", "clear", "copy", "index", "count"),
    Table: ("get", "items", "keys", "values", "update", "pop", "setdefault", "clear", "copy"),
    str: ("format", "join", "lower", "upper", "replace", "split", "startswith", "endswith", "strip"),
}


class NotPlainError(Exception):
    """The result of an operator on these operands is not known here."""


def binary(op: ast.operator, left: Any, right: Any) -> Any:
    """The value of an operator between two values. Raises NotPlainError."""
    function = OPERATORS.get(type(op))
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if function is None or not (numbers or (isinstance(op, ast.Add) and _of_one_kind(left, right))):
        raise NotPlainError
    if isinstance(op, ast.Pow) and (abs(left) > 10**6 or abs(right) > 64):
        raise NotPlainError
    return bounded(attempt(function, left, right))


def compare(op: ast.cmpop, left: Any, right: Any) -> bool:
    """Raises NotPlainError where an operand is no literal value."""
    if isinstance(op, ast.Is | ast.IsNot):
        if not (left is None or right is None or (isinstance(left, bool) and isinstance(right, bool))):
            raise NotPlainError
        return (left is right) == isinstance(op, ast.Is)
    if not isinstance(left, PLAIN) or not (
        isinstance(right, PLAIN) or (isinstance(op, ast.In | ast.NotIn) and plain(right))
    ):
        raise NotPlainError
    return bool(attempt(COMPARISONS[type(op)], left, right))


def plain(value: Any) -> bool:
    """Whether a value, with everything in it, is a literal."""
    if isinstance(value, Items | Table) and value.invalidated is not None:
        return False
    if isinstance(value, Table):
        return all(plain(item) for item in value.values())
    if isinstance(value, tuple | Items):
        return all(plain(item) for item in value)
    return isinstance(value, PLAIN)


def attempt(function: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Raises NotPlainError for any error of Python's: the program would end there."""
    try:
        return function(*given, **more)
    except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError):
        raise NotPlainError from None


def bounded(value: Any) -> Any:
    """Raises NotPlainError for a value that is too large."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise NotPlainError
    if isinstance(value, str | tuple | list | dict) and len(value) > MAX_LENGTH:
        raise NotPlainError
    return value


def method(owner: Any, name: str, arguments: list[Any], keywords: Mapping[str, Any]) -> Any:
    """The result of a method of a str, list or dict. Raises NotPlainError for a method that is not known."""
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in METHODS[kind] or getattr(owner, "invalidated", None) is not None:
        raise NotPlainError
    if kind is str and not all(plain(item) for item in (*arguments, *keywords.values())):
        raise NotPlainError
    if kind is str and (name == "format" or (name == "replace" and len(owner) > 1000)):
        raise NotPlainError
    if any(getattr(item, "invalidated", None) is not None for item in arguments):
        raise NotPlainError
    made = bounded(attempt(getattr(owner, name), *arguments, **keywords))
    bounded(owner)
    if isinstance(made, dict) and not isinstance(made, Table):
        return Table(made)
    if isinstance(made, list) and not isinstance(made, Items):
        return Items(made)
    if isinstance(made, type({}.items()) | type({}.keys()) | type({}.values())):
        return Items(made)
    return made


def _short(numbers: range) -> range:
    if len(numbers) > MAX_LENGTH:
        raise ValueError
    return numbers


def _of_one_kind(left: Any, right: Any) -> bool:
    if getattr(left, "invalidated", None) is not None or getattr(right, "invalidated", None) is not None:
        return False
    return any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, tuple, Items))
