"""The tree of verbs: unions of dataclasses with names, and where in it a command line is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shardwright.cli.arguments.usage import UsageError
from shardwright.core.findings.nearest import nearest


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a verb in a union of verbs, and others that are read too."""

    name: str
    also: tuple[str, ...] = ()


def subcommand(name: str, *also: str) -> Named:
    """``Annotated[PlanVerb, subcommand("plan")]`` is the verb `plan`."""
    return Named(name, also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb: its path from the program's name, and its dataclass. ``inner``: the verbs of which it needs one."""

    path: tuple[str, ...]
    of: type
    also: tuple[str, ...] = ()
    inner: Mapping[str, Verb]

    @property
    def typed(self) -> str:
        return " ".join(self.path)

    @property
    def name(self) -> str:
        """Its path without the program's name."""
        return " ".join(self.path[1:])

    def error(self, message: str) -> UsageError:
        """The error for a command line that is no use of this verb."""
        return UsageError(f"{self.name}: {message}" if self.name else message, self.help)

    @property
    def help(self) -> str:
        """The command that prints its help."""
        return f"{self.typed} --help"

    def leaves(self) -> Iterator[Verb]:
        """The verbs that run."""
        if not self.inner:
            yield self
        for verb in self.inner.values():
            yield from verb.leaves()


def tree(program: str, of: type) -> Verb:
    """The verbs of a program. ``of`` has a field ``verb``, a union of verbs."""
    return _verb((program,), of, ())


def _verb(path: tuple[str, ...], of: type, also: tuple[str, ...]) -> Verb:
    hint = get_type_hints(of, include_extras=True)["verb"] if [field.name for field in fields(of)] == ["verb"] else None
    inner = {name.name: _verb((*path, name.name), type_, name.also) for type_, name in _members(hint)}
    return Verb(path=path, of=of, also=also, inner=inner)


def _members(hint: Any) -> Iterator[tuple[type, Named]]:
    if hint is None:
        return
    if get_origin(hint) is Annotated:
        type_, *marks = get_args(hint)
        yield type_, next(mark for mark in marks if isinstance(mark, Named))
        return
    for part in get_args(hint):
        yield from _members(part)


def verb_of(root: Verb, arguments: Sequence[str]) -> tuple[Verb, int]:
    """The verb that arguments begin with, and how many of them name it. It is not the last one where help is asked for instead."""
    verb, number = root, 0
    while verb.inner:
        argument = arguments[number] if number < len(arguments) else None
        if argument in ("-h", "--help") or (verb is root and argument == "--version"):
            break
        following = _member(verb, argument)
        if following is None:
            raise verb.error(_no_verb(root, verb, argument, number + 1))
        verb, number = following, number + 1
    return verb, number


def _member(verb: Verb, argument: str | None) -> Verb | None:
    return next((member for name, member in verb.inner.items() if argument in (name, *member.also)), None)


def _no_verb(root: Verb, verb: Verb, argument: str | None, number: int) -> str:
    names = ", ".join(verb.inner)
    if argument is None:
        return f"a verb is missing. Give one of {names}."
    if argument.startswith("-"):
        return (
            f"argument {number} is '{argument}', and a verb belongs there; options stand after it. Give one of {names}."
        )
    match = nearest(argument, verb.inner)
    elsewhere = [leaf.name for leaf in root.leaves() if leaf.path[-1] == argument]
    meant = f"Did you mean '{match}'? " if match else f"Did you mean `{elsewhere[0]}`? " if elsewhere else ""
    return f"argument {number} is '{argument}', and no verb. {meant}There are {names}."
