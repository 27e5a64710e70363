"""The words in which a dataclass declares options, and the options that it declares.

A field is an option by its name, a ``Positional`` argument, or, where its type is a dataclass, a group of options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from shardwright.core.findings.nearest import nearest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ValueType:
    """How one value is read. ``read`` raises ValueError with a sentence about the value, or InputError with the entire message."""

    metavar: str
    read: Callable[[str], Any] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a help shows of a field in place of what its type says."""

    name: str | None
    metavar: str | None
    help_behavior_hint: str | None
    former: tuple[str, ...]


def arg(
    *,
    name: str | None = None,
    metavar: str | None = None,
    help_behavior_hint: str | None = None,
    former: tuple[str, ...] = (),
) -> Shown:
    """``help_behavior_hint``: what stands after the description, as "(default: none)". ``former``: names that are read still."""
    return Shown(name=name, metavar=metavar, help_behavior_hint=help_behavior_hint, former=former)


_POSITIONAL, _HIDDEN = object(), object()
Positional = Annotated[T, _POSITIONAL]
"""An argument without a name."""
Hidden = Annotated[T, _HIDDEN]
"""A field that no command line sets."""
Repeated = tuple[tuple[str, ...], ...]
"""The values of an option that takes several, and may occur several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option, or a positional argument."""

    field: str
    name: str
    """With its dashes; of a positional argument, what help calls it."""
    value: ValueType | None
    """None: a flag, which takes no value."""
    metavar: str
    positional: bool
    several: bool
    repeated: bool
    required: bool
    hint: str
    former: tuple[str, ...]
    of: type
    """The dataclass that declares it."""

    @property
    def typed(self) -> str:
        """How it is typed.

        >>> [option.typed for option in declaration(_Example).options]
        ['FILE', '--steps N']
        """
        return self.name if self.positional or self.value is None else f"{self.name} {self.metavar}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a dataclass declares. ``groups``: of the fields that are dataclasses themselves; ``name``: what help calls such a group."""

    of: type
    name: str
    own: tuple[Option, ...]
    groups: dict[str, Declaration]

    @property
    def options(self) -> Sequence[Option]:
        """All of them: positional arguments and options."""
        return (*self.own, *(option for group in self.groups.values() for option in group.options))


def declaration(of: type, name: str = "") -> Declaration:
    """The options that a dataclass declares."""
    hints = get_type_hints(of, include_extras=True)
    own: list[Option] = []
    groups: dict[str, Declaration] = {}
    for field in fields(of):
        hint = hints[field.name]
        inside, marks = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        if is_dataclass(inside) and isinstance(inside, type) and ValueType not in map(type, marks):
            groups[field.name] = declaration(inside, _shown(marks).name or field.name)
            continue
        if _HIDDEN not in marks:
            own.append(_option(of, field, inside, marks))
    return Declaration(of=of, name=name, own=tuple(own), groups=groups)


def _option(of: type, field: Field[Any], inside: Any, marks: tuple[Any, ...]) -> Option:
    shown = _shown(marks)
    positional = _POSITIONAL in marks
    several = get_origin(inside) is tuple
    value = next((mark for mark in marks if isinstance(mark, ValueType)), None) or _value_type(inside)
    metavar = shown.metavar or (value.metavar if value else "")
    default = field.default
    required = default is MISSING and field.default_factory is MISSING
    hint = "" if value is None else "(required)" if required else f"(default: {default})"
    return Option(
        field=field.name,
        name=metavar if positional else "--" + (shown.name or field.name).replace("_", "-"),
        value=value,
        metavar=metavar,
        positional=positional,
        several=several,
        repeated=inside == Repeated,
        required=required,
        hint=hint if shown.help_behavior_hint is None else shown.help_behavior_hint,
        former=shown.former,
        of=of,
    )


def _shown(marks: tuple[Any, ...]) -> Shown:
    return next((mark for mark in marks if isinstance(mark, Shown)), arg())


def one_of(*choices: str) -> ValueType:
    """A value that is one of ``choices``."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"'{text}' is none of {', '.join(choices)}.{_meant(text, choices)}")
        return text

    return ValueType(f"{{{','.join(choices)}}}", read)


def _meant(text: str, choices: Sequence[str]) -> str:
    match = nearest(text, choices)
    return f" Did you mean '{match}'?" if match else ""


def _value_type(inside: Any) -> ValueType | None:
    """How a value of a type is read that says nothing else; None for a flag."""
    if inside is bool:
        return None
    if get_origin(inside) is Literal:
        return one_of(*get_args(inside))
    parts = [part for part in get_args(inside) if part not in (NoneType, Ellipsis)]
    if parts:
        return _value_type(parts[0])
    return ValueType("PATH", Path) if inside is Path else ValueType("TEXT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    file: Positional[Annotated[str, arg(metavar="FILE")]]
    steps: Annotated[int, ValueType("N", int)] = 1
