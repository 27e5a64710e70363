"""Interpreting the statements of a function."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.interop.torchtitan.program import unknown
from shardwright.interop.torchtitan.program.constants import NotPlainError, binary
from shardwright.interop.torchtitan.program.expressions import bind, truth, value_of
from shardwright.interop.torchtitan.program.modules import file_of, imported_names, package_of, read_module
from shardwright.interop.torchtitan.program.state import RaisedError, State, text_of, unread
from shardwright.interop.torchtitan.program.values import Class, Function, Imported, Items, Scope, Table, Unread


class _ReturnedError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _LeftError(Exception):
    """``break`` and ``continue``."""

    def __init__(self, *, again: bool) -> None:
        self.again = again


def run(body: Sequence[ast.stmt], scope: Scope, state: State) -> Any:
    """What a function's body returns. Raises RaisedError where the program raises."""
    try:
        _all(body, scope, state)
    except _ReturnedError as returned:
        return returned.value
    return None


def run_module(scope: Scope, state: State) -> None:
    """Interpret a file from top to bottom; its names are in ``scope`` afterwards."""
    module = scope.module
    state.texts[module.source] = module.text
    scope.names["__name__"] = "config_registry"
    run(module.tree.body, scope, state)


def _all(body: Sequence[ast.stmt], scope: Scope, state: State) -> None:
    for node in body:
        if scope.maybe_returned is not None or scope.maybe_left is not None:
            unknown.forget(node, scope, state)
        else:
            _one(node, scope, state)


def _one(node: ast.stmt, scope: Scope, state: State) -> None:
    state.step(scope.module)
    match node:
        case ast.Return(value=value):
            raise _ReturnedError(None if value is None else value_of(value, scope, state))
        case ast.Assign(targets=targets, value=value):
            made = value_of(value, scope, state)
            for target in targets:
                bind(target, made, scope, state)
        case ast.AnnAssign(target=target, value=value):
            if value is not None:
                bind(target, value_of(value, scope, state), scope, state)
        case ast.AugAssign():
            _augmented(node, scope, state)
        case ast.Expr(value=value) | ast.Assert(test=value):
            value_of(value, scope, state)
        case ast.If():
            _if(node, scope, state)
        case ast.For():
            _for(node, scope, state)
        case ast.With(items=items, body=body):
            for item in items:
                value_of(item.context_expr, scope, state)
                if item.optional_vars is not None:
                    unknown.forget(item.optional_vars, scope, state)
            _all(body, scope, state)
        case ast.Raise():
            raise RaisedError(text_of(node.exc, 100) if node.exc else "an exception", scope.module.at(node))
        case ast.Break() | ast.Continue():
            raise _LeftError(again=isinstance(node, ast.Continue))
        case ast.FunctionDef(name=name):
            scope.names[name] = Function(node=node, scope=scope)
        case ast.ClassDef(name=name, bases=bases):
            found = tuple(value_of(base, scope, state) for base in bases)
            scope.names[name] = Class(node=node, scope=scope, bases=found)
        case ast.Import() | ast.ImportFrom():
            _import(node, scope, state)
        case ast.Pass():
            pass
        case _:
            unknown.forget(node, scope, state)


def _augmented(node: ast.AugAssign, scope: Scope, state: State) -> None:
    target = ast.copy_location(_loaded(node.target), node.target)
    left, right = value_of(target, scope, state), value_of(node.value, scope, state)
    try:
        if isinstance(left, Unread) or isinstance(right, Unread):
            raise NotPlainError
        if isinstance(left, Items) and isinstance(node.op, ast.Add) and isinstance(right, tuple | Items):
            # The list changes in place, for every name that is bound to it.
            left.extend(right)
            left.invalidated = left.invalidated or getattr(right, "invalidated", None)
            return
        made = binary(node.op, left, right)
    except NotPlainError:
        made = unread(scope, node, f"'{text_of(node)}' is not interpreted")
        if isinstance(left, Items | Table):
            left.invalidated = left.invalidated or made
    bind(node.target, made, scope, state)


def _loaded(target: ast.expr) -> ast.expr:
    match target:
        case ast.Name(id=name):
            return ast.Name(id=name, ctx=ast.Load())
        case ast.Attribute(value=value, attr=name):
            return ast.Attribute(value=value, attr=name, ctx=ast.Load())
        case ast.Subscript(value=value, slice=key):
            return ast.Subscript(value=value, slice=key, ctx=ast.Load())
    return target


def _if(node: ast.If, scope: Scope, state: State) -> None:
    chosen = truth(value_of(node.test, scope, state))
    if chosen is not None:
        _all(node.body if chosen else node.orelse, scope, state)
        return
    for each in (*node.body, *node.orelse):
        unknown.forget(each, scope, state)


def _for(node: ast.For, scope: Scope, state: State) -> None:
    over = value_of(node.iter, scope, state)
    if isinstance(over, Table) and over.invalidated is None:
        over = Items(over)
    if not isinstance(over, tuple | Items) or getattr(over, "invalidated", None) is not None:
        unknown.forget(node, scope, state)
        return
    for item in list(over):
        state.step(scope.module)
        bind(node.target, item, scope, state)
        try:
            _all(node.body, scope, state)
        except _LeftError as left:
            if not left.again:
                return
        if scope.maybe_left is not None:
            # It is not known whether the loop continued, nor what its other iterations did.
            scope.maybe_left = None
            unknown.forget(node, scope, state)
            return
    _all(node.orelse, scope, state)


def _import(node: ast.Import | ast.ImportFrom, scope: Scope, state: State) -> None:
    for bound_as, module, name in imported_names(node):
        if name == "*":
            # It may bind any name, including one that is bound here already.
            why = unread(scope, node, f"'{text_of(node)}' may have replaced it")
            scope.names.update(dict.fromkeys(scope.names, why))
            continue
        path = file_of(module, scope.module.source) if name else None
        if path is None:
            dotted = f"{package_of(scope.module.source)}{module}" if module.startswith(".") else module
            scope.names[bound_as] = Imported(name=f"{dotted.rstrip('.')}.{name}" if name else dotted)
        else:
            scope.names[bound_as] = _from(path, name, node, scope, state)


def _from(path: Any, name: str, node: ast.stmt, scope: Scope, state: State) -> Any:
    """A name of another file that is interpreted too."""
    path = path.resolve()
    if path not in state.modules:
        try:
            state.modules[path] = Scope(read_module(path))
            run_module(state.modules[path], state)
        except InputError as error:
            return unread(scope, node, str(error).split("\n")[0].removesuffix("."))
        except RaisedError as raised:
            return unread(scope, node, f"{path.name} ends with {raised.text}")
    try:
        return state.modules[path].find(name)
    except KeyError:
        return unread(scope, node, f"'{name}' is not in {path.name}")
