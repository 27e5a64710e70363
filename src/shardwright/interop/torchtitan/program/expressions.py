"""The value of an expression, or the reason why it is not known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from shardwright.interop.torchtitan.program import unknown
from shardwright.interop.torchtitan.program.constants import (
    FUNCTIONS,
    METHODS,
    UNARY,
    NotPlainError,
    attempt,
    binary,
    bounded,
    compare,
    plain,
)
from shardwright.interop.torchtitan.program.state import State, text_of, unread
from shardwright.interop.torchtitan.program.values import (
    Above,
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
    method_scope,
)

BUILTINS = (
    "setattr",
    "getattr",
    "hasattr",
    "isinstance",
    "issubclass",
    "print",
    "super",
    "type",
    "callable",
    "id",
    "vars",
)
"""Functions that do not change their arguments."""


def value_of(node: ast.expr, scope: Scope, state: State) -> Any:
    """The value of an expression; an Unread where only running it gives the value."""
    state.step(scope.module)
    reader = READERS.get(type(node))
    if reader is None:
        unknown.forget(node, scope, state)
        return unread(scope, node, f"'{text_of(node)}' is not interpreted")
    try:
        return reader(node, scope, state)
    except NotPlainError:
        return unread(scope, node, f"'{text_of(node)}' is not interpreted")


def truth(value: Any) -> bool | None:
    """Whether a value is true; None where that is not known."""
    if isinstance(value, Unread | Imported | Method) or getattr(value, "invalidated", None) is not None:
        return None
    if isinstance(value, Record):
        # An interpreted class may define its own truth value.
        return True if value.cls is None or value.cls.body(ast.FunctionDef, "__bool__") is None else None
    return True if isinstance(value, Function | Class | Partial) else bool(value)


def _constant(node: ast.Constant, _scope: Scope, _state: State) -> Any:
    return bounded(node.value)


def _name(node: ast.Name, scope: Scope, _state: State) -> Any:
    try:
        return scope.find(node.id)
    except KeyError:
        if node.id in FUNCTIONS or node.id in BUILTINS or node.id.lstrip("_")[:1].isupper():
            return Imported(name=node.id)
        return unread(scope, node, f"'{node.id}' is not in the file")


def _attribute(node: ast.Attribute, scope: Scope, state: State) -> Any:
    return known(field(value_of(node.value, scope, state), node.attr, node, scope, state), scope, node)


def field(owner: Any, name: str, node: ast.AST, scope: Scope, state: State) -> Any:
    """A field or a method of a value."""
    if isinstance(owner, Imported):
        return Imported(name=f"{owner.name}.{name}")
    if isinstance(owner, Record):
        return _field_of_record(owner, name, node, scope, state)
    if isinstance(owner, Above):
        found = owner.cls.body(ast.FunctionDef, name) if owner.cls is not None else None
        if found is not None:
            return Function(node=found[1], scope=method_scope(found[0], owner.owner), bound=owner.owner)
        return Imported(name=f"super.{name}") if name == "__post_init__" else Method(owner=owner, name=name)
    if isinstance(owner, Class):
        found = owner.body(ast.FunctionDef, name)
        if found is not None:
            return Function(node=found[1], scope=found[0].scope)
        inner = owner.body(ast.ClassDef, name)
        if inner is not None:
            bases = tuple(value_of(base, inner[0].scope, state) for base in inner[1].bases)
            return Class(node=inner[1], scope=inner[0].scope, bases=bases)
        return Method(owner=owner, name=name)
    if any(isinstance(owner, kind) and name in names for kind, names in METHODS.items()):
        return Method(owner=owner, name=name)
    if isinstance(owner, Unread):
        return Unread(why=owner.why, position=owner.position)
    return Method(owner=owner, name=name)


def _field_of_record(owner: Record, name: str, node: ast.AST, scope: Scope, state: State) -> Any:
    if owner.invalidated is not None:
        return owner.invalidated
    if name in owner.fields:
        return owner.fields[name][0]
    found = owner.cls.body(ast.FunctionDef, name) if owner.cls is not None else None
    if found is not None:
        if found[1].decorator_list:
            return unread(scope, node, f"'{name}' is decorated, and the result of that is not known")
        return Function(node=found[1], scope=method_scope(found[0], owner), bound=owner)
    defaults = state.defaults_of(owner.kind)
    if defaults is not None and name in defaults:
        made = Record(defaults[name]) if isinstance(defaults[name], str) else defaults[name]
        if isinstance(made, Record):
            # A second access must give the same object.
            owner.fields[name] = (made, scope.module.at(node))
        return made
    return Method(owner=owner, name=name)


def known(value: Any, scope: Scope, node: ast.AST) -> Any:
    """The value; an Unread where it is a method that was not called, which is a field that was not given."""
    if isinstance(value, Method) and not isinstance(value.owner, str | Items | Table):
        return unread(scope, node, f"'{value.name}' is not given, and its default is not in the file")
    return value


def _binary(node: ast.BinOp, scope: Scope, state: State) -> Any:
    left, right = value_of(node.left, scope, state), value_of(node.right, scope, state)
    return _unread_of(left, right) or binary(node.op, left, right)


def _unary(node: ast.UnaryOp, scope: Scope, state: State) -> Any:
    value = value_of(node.operand, scope, state)
    if isinstance(node.op, ast.Not):
        known_truth = truth(value)
        return (
            _unread_of(value) or unread(scope, node, f"'{text_of(node)}' is not known")
            if known_truth is None
            else not known_truth
        )
    if not isinstance(value, int | float):
        raise NotPlainError
    return attempt(UNARY[type(node.op)], value)


def _boolean(node: ast.BoolOp, scope: Scope, state: State) -> Any:
    value: Any = None
    for index, operand in enumerate(node.values):
        value = value_of(operand, scope, state)
        known_truth = truth(value)
        if known_truth is None:
            for rest in node.values[index + 1 :]:
                unknown.forget(rest, scope, state)
            return unread(scope, node, f"'{text_of(node)}' is not known")
        if known_truth == isinstance(node.op, ast.Or):
            return value
    return value


def _compare(node: ast.Compare, scope: Scope, state: State) -> Any:
    left = value_of(node.left, scope, state)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = value_of(other, scope, state)
        if _unread_of(left, right):
            return _unread_of(left, right)
        if not _holds(op, left, right):
            return False
        left = right
    return True


def _holds(op: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(op, ast.Is | ast.IsNot) and (left is None or right is None):
        other = right if left is None else left
        if isinstance(other, Record | Class | Function | Items | Table | tuple):
            return isinstance(op, ast.IsNot)
    return compare(op, left, right)


def _conditional(node: ast.IfExp, scope: Scope, state: State) -> Any:
    chosen = truth(value_of(node.test, scope, state))
    if chosen is None:
        unknown.forget(node.body, scope, state)
        unknown.forget(node.orelse, scope, state)
        return unread(scope, node, f"'{text_of(node.test)}' is not known")
    return value_of(node.body if chosen else node.orelse, scope, state)


def _sequence(node: ast.List | ast.Tuple | ast.Set, scope: Scope, state: State) -> Any:
    items: list[Any] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            more = value_of(each.value, scope, state)
            if not isinstance(more, tuple | Items) or getattr(more, "invalidated", None) is not None:
                return unread(scope, each, f"'{text_of(each)}' is not known")
            items += more
        else:
            items.append(value_of(each, scope, state))
    return tuple(items) if isinstance(node, ast.Tuple) else Items(items)


def _table(node: ast.Dict, scope: Scope, state: State) -> Any:
    made = Table()
    for key, item in zip(node.keys, node.values, strict=True):
        value = value_of(item, scope, state)
        if key is None:
            if not isinstance(value, Table) or value.invalidated is not None:
                return unread(scope, item, f"'**{text_of(item)}' is not known")
            made.update(value)
        else:
            name = value_of(key, scope, state)
            if not plain(name) or isinstance(name, Items | Table):
                return unread(scope, key, f"the key '{text_of(key)}' is not known")
            made[name] = value
    return made


def _item(node: ast.Subscript, scope: Scope, state: State) -> Any:
    owner, key = value_of(node.value, scope, state), value_of(node.slice, scope, state)
    if _unread_of(owner, key):
        return _unread_of(owner, key)
    if isinstance(owner, Imported | Class):
        # A generic type with its parameters, or an item of a dict of another file.
        return unread(scope, node, f"'{text_of(node)}' is not in the file")
    if not isinstance(owner, Items | Table | tuple | str) or getattr(owner, "invalidated", None) is not None:
        raise NotPlainError
    if not plain(key):
        raise NotPlainError
    return attempt(owner.__getitem__, key)


def _text(node: ast.JoinedStr, scope: Scope, state: State) -> Any:
    texts = []
    for each in node.values:
        if isinstance(each, ast.FormattedValue):
            value = value_of(each.value, scope, state)
            if each.format_spec is not None or each.conversion != -1 or not plain(value):
                raise NotPlainError
            texts.append(str(value))
        else:
            texts.append(str(value_of(each, scope, state)))
    return bounded("".join(texts))


def _comprehension(node: Any, scope: Scope, state: State) -> Any:
    """Its names are local to it."""
    inner, made = Scope(scope.module, scope), []
    for _ in _rounds(node, node.generators, inner, state):
        if isinstance(node, ast.DictComp):
            made.append((value_of(node.key, inner, state), value_of(node.value, inner, state)))
        else:
            made.append(value_of(node.elt, inner, state))
    if not isinstance(node, ast.DictComp):
        return Items(made)
    if not all(plain(key) and not isinstance(key, Items | Table) for key, _ in made):
        raise NotPlainError
    return Table(made)


def _rounds(node: ast.expr, generators: list[ast.comprehension], scope: Scope, state: State) -> Iterator[None]:
    if not generators:
        yield
        return
    first, *others = generators
    over = value_of(first.iter, scope, state)
    if isinstance(over, Table) and over.invalidated is None:
        over = Items(over)
    if not isinstance(over, tuple | Items) or getattr(over, "invalidated", None) is not None:
        unknown.forget(node, scope, state)
        raise NotPlainError
    for item in list(over):
        bind(first.target, item, scope, state)
        kept = [truth(value_of(test, scope, state)) for test in first.ifs]
        if None in kept:
            unknown.forget(node, scope, state)
            raise NotPlainError
        if all(kept):
            yield from _rounds(node, others, scope, state)


def _walrus(node: ast.NamedExpr, scope: Scope, state: State) -> Any:
    value = value_of(node.value, scope, state)
    bind(node.target, value, scope, state)
    return value


def bind(target: ast.expr, value: Any, scope: Scope, state: State) -> None:
    """Assign a value to a name, a field or an item."""
    if isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Attribute):
        set_field(value_of(target.value, scope, state), target.attr, value, target, scope, state)
    elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(each, ast.Starred) for each in target.elts):
        same = isinstance(value, tuple | Items) and len(value) == len(target.elts)
        if not same or getattr(value, "invalidated", None) is not None:
            value = [unread(scope, target, "the value that is unpacked here is not known")] * len(target.elts)
        for each, item in zip(target.elts, value, strict=True):
            bind(each, item, scope, state)
    elif isinstance(target, ast.Subscript):
        owner, key = value_of(target.value, scope, state), value_of(target.slice, scope, state)
        if isinstance(owner, Table) and plain(key) and not isinstance(key, Items | Table):
            owner[key] = value
        elif isinstance(owner, Items | Table):
            owner.invalidated = owner.invalidated or unread(scope, target, f"'{text_of(target)}' is set")
    else:
        unknown.forget(target, scope, state)


def set_field(owner: Any, name: str, value: Any, node: ast.AST, scope: Scope, state: State) -> None:
    """Set a field of an object; record it where the object is not known and the name is a watched one."""
    if isinstance(owner, Record) and owner.invalidated is None:
        hooked = owner.cls is not None and owner.cls.body(ast.FunctionDef, "__setattr__") is not None
        owner.fields[name] = (
            unread(scope, node, "its class defines __setattr__") if hooked else value,
            scope.module.at(node),
        )
    elif name in state.watched:
        state.unknown_stores.append((name, scope.module.at(node)))


def _lambda(node: ast.Lambda, scope: Scope, _state: State) -> Any:
    return Function(node=node, scope=scope)


def _unread_of(*values: Any) -> Unread | None:
    for value in values:
        if isinstance(value, Unread):
            return Unread(why=value.why, position=value.position)
    return None


READERS: dict[type[ast.expr], Callable[[Any, Scope, State], Any]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Call: lambda node, scope, state: state.call(node, scope, state),
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.IfExp: _conditional,
    ast.List: _sequence,
    ast.Tuple: _sequence,
    ast.Set: _sequence,
    ast.Dict: _table,
    ast.Subscript: _item,
    ast.JoinedStr: _text,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.NamedExpr: _walrus,
    ast.Lambda: _lambda,
}
"""The evaluator of each kind of expression; other kinds are not interpreted."""
