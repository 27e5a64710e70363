"""What a name may be bound to during interpretation. Numbers, strings, tuples and None are themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an imported name: the dotted name and the arguments."""

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A value that only running the program gives: the reason, and where it first applies. ``call``: the call that made it."""

    why: str
    position: Position
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A name of another file that is not interpreted: ``torchtitan.trainer.Trainer``."""

    name: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


class Scope:
    """The names of a file or of one function call, and the enclosing scope."""

    __slots__ = ("enclosing", "maybe_left", "maybe_returned", "module", "names")

    def __init__(self, module: Any, enclosing: Scope | None = None) -> None:
        self.names: dict[str, Any] = {}
        self.module, self.enclosing = module, enclosing
        self.maybe_returned: Unread | None = None
        self.maybe_left: Unread | None = None

    def find(self, name: str) -> Any:
        """The value of a name. Raises KeyError."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.enclosing
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Function:
    """A function or a lambda with its enclosing scope. ``bound``: the object whose method it is."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope
    bound: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Class:
    """A class of an interpreted file, with its bases."""

    node: ast.ClassDef
    scope: Scope
    bases: tuple[Any, ...]

    def ancestry(self) -> Iterator[Class]:
        """The class and its interpreted base classes, the nearest first."""
        yield self
        for base in self.bases:
            if isinstance(base, Class):
                yield from base.ancestry()

    @property
    def root(self) -> str:
        """The first base class of another file that is not interpreted, by name; the class itself where there is none."""
        for base in self.bases:
            return base.root if isinstance(base, Class) else getattr(base, "name", self.node.name)
        return self.node.name

    def body(self, kind: type[ast.stmt], name: str) -> tuple[Class, Any] | None:
        """The nearest statement of a kind and name in the class bodies, with its class."""
        for each in self.ancestry():
            for node in each.node.body:
                if isinstance(node, kind) and getattr(node, "name", None) == name:
                    return each, node
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """A function with some arguments given."""

    function: Any
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Method:
    """A method of a value."""

    owner: Any
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Above:
    """``super()``: an object, and the base class where lookup starts; None where that class is not interpreted."""

    owner: Any
    cls: Class | None


class Record:
    """An object that a class made, with the fields that were given and their positions. ``invalidated``: why no field is known."""

    __slots__ = ("cls", "fields", "invalidated", "name")

    def __init__(self, name: str, cls: Class | None = None) -> None:
        self.name, self.cls = name, cls
        self.fields: dict[str, tuple[Any, Position]] = {}
        self.invalidated: Unread | None = None

    @property
    def kind(self) -> str:
        """The dotted name of the class of another file that it is an instance of."""
        return self.cls.root if self.cls is not None else self.name

    def copy(self) -> Record:
        made = Record(self.name, self.cls)
        made.fields, made.invalidated = dict(self.fields), self.invalidated
        return made


class Items(list):
    """A list that the program made. ``invalidated``: why its items are not known."""

    invalidated: Unread | None = None


class Table(dict):
    """A dict that the program made. ``invalidated``: why its items are not known."""

    invalidated: Unread | None = None


def deep_copy(value: Any, made: dict[int, Any] | None = None) -> Any:
    """A copy that shares no mutable value."""
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Record):
        other: Any = value.copy()
        made[id(value)] = other
        for name, (item, position) in value.fields.items():
            other.fields[name] = (deep_copy(item, made), position)
        return other
    if isinstance(value, Items):
        other = Items()
        made[id(value)] = other
        other.invalidated = value.invalidated
        other.extend(deep_copy(item, made) for item in value)
        return other
    if isinstance(value, Table):
        other = Table()
        made[id(value)] = other
        other.invalidated = value.invalidated
        other.update({key: deep_copy(item, made) for key, item in value.items()})
        return other
    if isinstance(value, tuple):
        return tuple(deep_copy(item, made) for item in value)
    return value


def invalidate(values: list[Any], why: Unread) -> None:
    """Code that is not interpreted had these values: all mutable values reachable from them are no longer known."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Record):
            values += [item for item, _ in value.fields.values()]
            value.invalidated = value.invalidated or why
        elif isinstance(value, Items | Table):
            values += list(value) if isinstance(value, Items) else list(value.values())
            value.invalidated = value.invalidated or why
        elif isinstance(value, tuple):
            values += value
        elif isinstance(value, Partial):
            values += [value.function, *value.arguments, *value.keywords.values()]
        elif isinstance(value, Method | Above):
            values.append(value.owner)
        elif isinstance(value, Function):
            values.append(value.bound)
            values += named_in(value.node, value.scope)


def method_scope(cls: Class, owner: Any) -> Scope:
    """The enclosing scope of a method of a class, with what ``super()`` needs."""
    scope = Scope(cls.scope.module, cls.scope)
    scope.names.update({"__class__": cls, "__self__": owner})
    return scope


def named_in(node: ast.AST, scope: Scope) -> list[Any]:
    """The known values of the names in an expression or a body."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            try:
                found.append(scope.find(each.id))
            except KeyError:
                continue
    return found
