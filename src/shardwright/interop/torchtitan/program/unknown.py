"""What a statement or expression can change that may run any number of times: those values are no longer known."""

from __future__ import annotations

import ast
from typing import Any

from shardwright.interop.torchtitan.program.state import State, text_of, unread
from shardwright.interop.torchtitan.program.values import (
    Imported,
    Items,
    Record,
    Scope,
    Table,
    Unread,
    invalidate,
    named_in,
)

HARMLESS = frozenset(
    {"isinstance", "issubclass", "print", "len", "int", "str", "bool", "float", "max", "min", "range", "cast"}
)
"""Functions that do not change their arguments."""
LOGGERS = frozenset({"logger", "logging", "log", "warnings"})


def forget(node: ast.AST, scope: Scope, state: State) -> None:
    """Make unknown the names that ``node`` may bind, and invalidate the values that it may change."""
    stores = [each for each in ast.walk(node) if isinstance(each, ast.Attribute | ast.Subscript) and _stores(each)]
    loops = [each for each in ast.walk(node) if isinstance(each, ast.For | ast.AsyncFor | ast.While)]
    inside = {id(each) for loop in loops for each in ast.walk(loop)}
    own = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _stores(each)}
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and not harmless(each.func, scope)]
    if any(own & _names(each) for each in (*stores, *calls)):
        # A name that it binds may be an alias of any value that it names.
        invalidate(named_in(node, scope), unread(scope, node, f"'{text_of(node)}' may change it"))
    for each in ast.walk(node):
        why = (
            unread(scope, each, f"it is not known whether '{text_of(each)}' runs") if hasattr(each, "lineno") else None
        )
        if why is None:
            continue
        match each:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                scope.names[name] = why
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope.names[name] = why
            case ast.ExceptHandler(name=str(name)):
                scope.names[name] = why
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    scope.names[alias.asname or alias.name.partition(".")[0]] = why
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                scope.names[name] = why
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                _forget_field(owner, name, why, scope, state)
            case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
                invalidate(
                    [_reached(owner, scope)] if _reached(owner, scope) is not None else named_in(owner, scope), why
                )
            case ast.Call():
                _forget_call(each, why, scope)
            case ast.Return():
                scope.maybe_returned = scope.maybe_returned or why
            case ast.Break() | ast.Continue() if id(each) not in inside:
                scope.maybe_left = scope.maybe_left or why


def _stores(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _forget_field(owner: ast.expr, name: str, why: Unread, scope: Scope, state: State) -> None:
    found = _reached(owner, scope)
    if isinstance(found, Record):
        found.fields[name] = (why, why.position)
        return
    invalidate(named_in(owner, scope), why)
    if name in state.watched:
        state.unknown_stores.append((name, why.position))


def _forget_call(node: ast.Call, why: Unread, scope: Scope) -> None:
    if harmless(node.func, scope):
        return
    invalidate([each for child in (node.func, *node.args, *node.keywords) for each in named_in(child, scope)], why)


def harmless(function: ast.expr, scope: Scope) -> bool:
    """Whether a call does not change its arguments: it makes an object, or only reads."""
    found = _reached(function, scope)
    if not (found is None or isinstance(found, Imported)):
        return False
    if isinstance(function, ast.Attribute):
        logs = isinstance(function.value, ast.Name) and function.value.id in LOGGERS
        return logs or function.attr.lstrip("_")[:1].isupper()
    name = getattr(function, "id", "")
    of_python = found is None or found.name in (name, f"typing.{name}")
    return (name in HARMLESS and of_python) or name.lstrip("_")[:1].isupper()


def _reached(node: ast.expr, scope: Scope) -> Any:
    """The value of a chain of names and fields; None where it is not known. The lookup changes nothing."""
    if isinstance(node, ast.Name):
        try:
            return scope.find(node.id)
        except KeyError:
            return None
    if isinstance(node, ast.Attribute):
        owner = _reached(node.value, scope)
        if isinstance(owner, Record) and owner.invalidated is None and node.attr in owner.fields:
            return owner.fields[node.attr][0]
        if isinstance(owner, Imported):
            return Imported(name=f"{owner.name}.{node.attr}")
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _reached(node.value, scope)
        if isinstance(owner, Table) and owner.invalidated is None:
            return owner.get(node.slice.value)
        if isinstance(owner, Items) and owner.invalidated is None and isinstance(node.slice.value, int):
            return owner[node.slice.value] if -len(owner) <= node.slice.value < len(owner) else None
    return None
