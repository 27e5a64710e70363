"""The result of a call, and which of its arguments it may change.

A class of another file makes an object and does not change its arguments. The same holds for the functions in
``expressions.BUILTINS`` and for those that copy. Any other function of another file may change all that it can reach.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.interop.torchtitan.program import expressions, statements, unknown
from shardwright.interop.torchtitan.program.arguments import bound, spread, spread_named
from shardwright.interop.torchtitan.program.constants import FUNCTIONS, NotPlainError, attempt, bounded, method, plain
from shardwright.interop.torchtitan.program.state import MAX_DEPTH, State, text_of, unread
from shardwright.interop.torchtitan.program.values import (
    Above,
    Call,
    Class,
    Function,
    Imported,
    Items,
    Method,
    Partial,
    Record,
    Scope,
    Table,
    Unread,
    deep_copy,
    invalidate,
    method_scope,
)

STRUCTURAL = ("len", "list", "tuple", "dict", "zip", "enumerate", "reversed", "range")
"""Functions that use a list's or a dict's structure and not its items."""


def call(node: ast.Call, scope: Scope, state: State) -> Any:
    """The value of a call."""
    if isinstance(node.func, ast.Attribute):
        owner = expressions.value_of(node.func.value, scope, state)
        function = expressions.field(owner, node.func.attr, node.func, scope, state)
    else:
        function = expressions.value_of(node.func, scope, state)
    given: list[Any] = []
    named: dict[str, Any] = {}
    complete = True
    for each in node.args:
        value = expressions.value_of(each.value if isinstance(each, ast.Starred) else each, scope, state)
        more = spread(value) if isinstance(each, ast.Starred) else [value]
        complete = complete and more is not None
        given += [value] if more is None else more
    for keyword in node.keywords:
        value = expressions.value_of(keyword.value, scope, state)
        more_named = spread_named(value) if keyword.arg is None else {keyword.arg: value}
        complete = complete and more_named is not None
        named.update({"**": value} if more_named is None else more_named)
    if not complete and not (isinstance(function, Imported) and _makes(function)):
        return _by_others(function, node, given, named, scope)
    reads_only = isinstance(function, Imported) and not _makes(function) and unknown.harmless(node.func, scope)
    if reads_only and function.name not in FUNCTIONS and function.last != "cast":
        return unread(scope, node, f"'{text_of(node)}' is not known")
    return invoke(function, given, named, node, scope, state, complete=complete)


def invoke(
    function: Any,
    given: list[Any],
    named: Mapping[str, Any],
    node: ast.AST,
    scope: Scope,
    state: State,
    *,
    complete: bool = True,
) -> Any:
    """The result of calling a function or a class. ``complete``: these are all of its arguments."""
    match function:
        case Partial():
            merged = {**function.keywords, **named}
            return invoke(function.function, [*function.arguments, *given], merged, node, scope, state)
        case Function():
            return _run(function, given, named, node, scope, state)
        case Class():
            return _make(function, given, named, node, scope, state)
        case Method(owner=owner, name=name):
            try:
                return method(owner, name, given, named)
            except NotPlainError:
                return _by_others(function, node, given, named, scope)
        case Imported():
            return _imported(function, given, named, node, scope, state, complete=complete)
    return _by_others(function, node, given, named, scope)


def _makes(function: Imported) -> bool:
    """Whether a name of another file is a class's."""
    return function.last.lstrip("_")[:1].isupper()


def _by_others(function: Any, node: ast.AST, given: list[Any], named: Mapping[str, Any], scope: Scope) -> Unread:
    what = text_of(node.func) if isinstance(node, ast.Call) else text_of(node)
    changed = unread(scope, node, f"'{what}' may change it, and is not in the file")
    invalidate([function, *given, *named.values()], changed)
    if isinstance(function, Unread):
        return Unread(why=function.why, position=function.position)
    name = function.name if isinstance(function, Imported) else what
    made = Call(name=name, arguments=tuple(given), keywords=dict(named))
    return Unread(why=f"what '{what}' returns is not in the file", position=changed.position, call=made)


def _imported(
    function: Imported,
    given: list[Any],
    named: Mapping[str, Any],
    node: ast.AST,
    scope: Scope,
    state: State,
    *,
    complete: bool,
) -> Any:
    if function.name in SPECIAL and complete:
        made = SPECIAL[function.name](given, dict(named), node, scope, state)
        if made is not NotImplemented:
            return made
    elif function.name in FUNCTIONS:
        known = all(not isinstance(item, Unread) and getattr(item, "invalidated", None) is None for item in given)
        if known and (function.name in STRUCTURAL or all(plain(item) for item in (*given, *named.values()))):
            return bounded(attempt(FUNCTIONS[function.name], *given, **named))
        raise NotPlainError
    elif _makes(function):
        made = Record(function.name)
        made.fields = {name: (value, _place(node, name, scope)) for name, value in named.items()}
        if given or not complete:
            made.invalidated = unread(
                scope, node, f"'{text_of(node)}' has arguments other than known keyword arguments"
            )
        return made
    elif function.last in ("__post_init__", "__init__"):
        return None
    return _by_others(function, node, given, named, scope)


def _place(node: ast.AST, name: str, scope: Scope) -> Any:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return scope.module.at(next((each for each in keywords if each.arg == name), node))


def _run(
    function: Function, given: list[Any], named: Mapping[str, Any], node: ast.AST, scope: Scope, state: State
) -> Any:
    """Interpret a function of the file."""
    inner = Scope(function.scope.module, function.scope)
    body = function.node
    odd = next((each for each in ast.walk(body) if isinstance(each, ODD)), None)
    if odd is not None or getattr(body, "decorator_list", None) or state.depth >= MAX_DEPTH:
        why = "is decorated" if getattr(body, "decorator_list", None) else "has statements that are not interpreted"
        made = _by_others(function, node, given, named, scope)
        return Unread(why=f"'{text_of(getattr(node, 'func', node))}' {why}", position=made.position)
    if function.bound is not None:
        given = [function.bound, *given]
    values = bound(body.args, given, named, lambda default: _default_of(default, function.scope, state))
    if values is None:
        return _by_others(function, node, given, named, scope)
    inner.names.update(values)
    state.depth += 1
    try:
        if isinstance(body, ast.Lambda):
            return expressions.value_of(body.body, inner, state)
        result = statements.run(body.body, inner, state)
    finally:
        state.depth -= 1
    return inner.maybe_returned or result


def _default_of(node: ast.expr, scope: Scope, state: State) -> Any:
    """A parameter's default: the same object for all calls."""
    key = (id(node), scope)
    if key not in state.parameters:
        state.parameters[key] = expressions.value_of(node, scope, state)
    return state.parameters[key]


ODD = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)


def _make(cls: Class, given: list[Any], named: Mapping[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:
    """An object of a class of the file, with the defaults of its fields, after its ``__post_init__``."""
    made = Record(cls.node.name, cls)
    line = list(cls.ancestry())
    plain_class = all(
        _only_dataclass(each) and not isinstance(base, Unread) for each in line for base in (*each.bases, None)
    )
    if given or not plain_class or cls.body(ast.FunctionDef, "__init__") is not None:
        made.invalidated = unread(scope, node, f"the construction of '{cls.node.name}' is not interpreted")
        invalidate([*given, *named.values()], made.invalidated)
        return made
    for each in reversed(line):
        for statement in each.node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as default) if name not in named:
                    made.fields[name] = (_default(default, each.scope, state), each.scope.module.at(statement))
    made.fields.update({name: (value, _place(node, name, scope)) for name, value in named.items()})
    found = cls.body(ast.FunctionDef, "__post_init__")
    if found is not None:
        _run(Function(node=found[1], scope=method_scope(found[0], made), bound=made), [], {}, node, scope, state)
    return made


def _only_dataclass(cls: Class) -> bool:
    """Whether a class is constructed as a dataclass is: no metaclass, no other decorator, no method that runs before the fields are set."""
    if cls.node.keywords or any(
        cls.body(ast.FunctionDef, name) for name in ("__new__", "__getattr__", "__getattribute__")
    ):
        return False
    names = [text_of(each.func if isinstance(each, ast.Call) else each) for each in cls.node.decorator_list]
    return all(name.rpartition(".")[2] == "dataclass" for name in names)


def _default(node: ast.expr, scope: Scope, state: State) -> Any:
    """The default of a dataclass's field, evaluated for each object."""
    if isinstance(node, ast.Call) and text_of(node.func).rpartition(".")[2] == "field":
        for keyword in node.keywords:
            if keyword.arg == "default":
                return expressions.value_of(keyword.value, scope, state)
            if keyword.arg == "default_factory":
                return invoke(expressions.value_of(keyword.value, scope, state), [], {}, node, scope, state)
        return unread(scope, node, f"'{text_of(node)}' is not known")
    return expressions.value_of(node, scope, state)


def _replaced(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:
    if len(given) != 1 or not isinstance(given[0], Record):
        return unread(scope, node, f"the object that '{text_of(node)}' copies is not known")
    made = given[0].copy()
    if made.cls is not None and made.cls.body(ast.FunctionDef, "__post_init__") is not None:
        values = {name: value for name, (value, _) in made.fields.items()}
        return _make(made.cls, [], {**values, **named}, node, scope, state)
    made.fields.update({name: (value, _place(node, name, scope)) for name, value in named.items()})
    return made


def _set(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:
    if len(given) != 3 or named or not isinstance(given[1], str):
        return NotImplemented
    expressions.set_field(given[0], given[1], given[2], node, scope, state)
    return None


def _get(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:
    if len(given) != 2 or named or not isinstance(given[1], str):
        raise NotPlainError
    return expressions.known(expressions.field(given[0], given[1], node, scope, state), scope, node)


def _super(given: list[Any], _named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:
    try:
        cls, owner = scope.find("__class__"), scope.find("__self__")
    except KeyError:
        cls = owner = None
    if given or cls is None:
        state.unknown_stores.append(("super", scope.module.at(node)))
        return NotImplemented
    return Above(owner=owner, cls=next((base for base in cls.bases if isinstance(base, Class)), None))


def _partial(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:  # noqa: ARG001
    return Partial(function=given[0], arguments=tuple(given[1:]), keywords=named) if given else NotImplemented


def _copied(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:  # noqa: ARG001
    if len(given) != 1 or named:
        return NotImplemented
    value = given[0]
    if isinstance(value, Items | Table):
        made = type(value)(value)
        made.invalidated = value.invalidated
        return made
    return value.copy() if isinstance(value, Record) else value


def _deep_copied(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:  # noqa: ARG001
    return deep_copy(given[0]) if len(given) == 1 and not named else NotImplemented


def _cast(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:  # noqa: ARG001
    return given[1] if len(given) == 2 else NotImplemented


def _as_graph_trainer(given: list[Any], named: dict[str, Any], node: ast.AST, scope: Scope, state: State) -> Any:  # noqa: ARG001
    """A trainer's configuration as a graph trainer's: the degrees are copied, everything else is shared."""
    if not given or not isinstance(given[0], Record):
        return NotImplemented
    made = given[0].copy()
    parallelism = expressions.field(made, "parallelism", node, scope, state)
    if isinstance(parallelism, Record):
        made.fields["parallelism"] = (parallelism.copy(), scope.module.at(node))
    return made


SPECIAL: Mapping[str, Callable[[list[Any], dict[str, Any], ast.AST, Scope, State], Any]] = {
    "dataclasses.replace": _replaced,
    "copy.replace": _replaced,
    "copy.copy": _copied,
    "copy.deepcopy": _deep_copied,
    "typing.cast": _cast,
    "functools.partial": _partial,
    "setattr": _set,
    "getattr": _get,
    "super": _super,
    "torchtitan.experiments.graph_trainer.configs.to_graph_trainer_config": _as_graph_trainer,
}
"""Functions of other files whose effect is known."""
