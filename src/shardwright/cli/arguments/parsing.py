"""From the arguments after a verb's name to its dataclass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.cli.arguments.declared import Declaration, Option, declaration
from shardwright.cli.arguments.usage import UsageError
from shardwright.cli.arguments.verbs import Verb
from shardwright.core.findings.nearest import nearest

HELP = ("-h", "--help")

_NUMBER = re.compile(r"-[\d.]|-(inf|nan)")


def parse(verb: Verb, root: Verb, arguments: Sequence[str], first: int) -> Any:
    """The dataclass of a verb. ``first``: the place of ``arguments[0]`` in the command line, from 1; messages name places.

    Raises UsageError, or the InputError of a value.
    """
    declared = declaration(verb.of)
    reader = _Reader(verb, root, declared, arguments, first)
    reader.read_all()
    return _built(declared, reader.values)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether an argument before ``--`` asks for the help of a verb."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(argument in HELP for argument in before)


def is_option(argument: str) -> bool:
    """Whether an argument is an option, and no value.

    >>> [is_option(argument) for argument in ("--mesh", "-x", "-2", "-1e-3", "-", "fsdp")]
    [True, True, False, False, False, False]
    """
    return argument.startswith("-") and argument != "-" and not _NUMBER.match(argument)


class _Reader:
    """Goes through the arguments from left to right."""

    def __init__(self, verb: Verb, root: Verb, declared: Declaration, arguments: Sequence[str], first: int) -> None:
        self.verb, self.root, self.declared = verb, root, declared
        self.arguments, self.first, self.number = arguments, first, 0
        self.values: dict[tuple[type, str], Any] = {}
        self.places: dict[str, int] = {}
        self.taken = ""

    def read_all(self) -> None:
        positional = [option for option in self.declared.options if option.positional]
        only_positional = False
        while self.number < len(self.arguments):
            argument = self.arguments[self.number]
            if argument == "--" and not only_positional:
                only_positional = True
                self.number += 1
            elif is_option(argument) and not only_positional:
                self._read_option(argument)
            else:
                self._read_positional(argument, positional)
        missing = [
            option for option in self.declared.options if option.required and self._key(option) not in self.values
        ]
        if missing:
            names = _and([option.typed for option in missing])
            taken = f" {self.taken} Give {missing[0].name} before it." if missing[0].positional and self.taken else ""
            raise self._error(f"{names} {'is' if len(missing) == 1 else 'are'} missing.{taken}")

    def _read_positional(self, argument: str, positional: list[Option]) -> None:
        if not positional:
            most = [option.name for option in self.declared.options if option.positional]
            takes = f"takes {_and(most)} only" if most else "takes options only"
            raise self._error(f"argument {self._place()} is '{argument}', and this verb {takes}.")
        option = positional[0]
        value = self._value(option, argument, self._place())
        if option.several:
            self.values[self._key(option)] = (*self.values.get(self._key(option), ()), value)
        else:
            self.values[self._key(option)] = value
            positional.pop(0)
        self.number += 1

    def _read_option(self, argument: str) -> None:
        name, equals, inline = argument.partition("=")
        place = self._place()
        option = self._option(name, place)
        self.number += 1
        if not option.repeated and option.name in self.places:
            raise self._error(
                f"{option.name} occurs twice: as arguments {self.places[option.name]} and {place}. Leave one out."
            )
        self.places[option.name] = place
        if option.value is None:
            if equals:
                raise self._error(
                    f"{option.name} (argument {place}) takes no value, and has '{inline}'. Leave '={inline}' out."
                )
            self.values[self._key(option)] = True
            return
        texts = [(inline, place)] if equals else self._texts(option, place)
        if option.repeated:
            group = tuple(self._value(option, text, at) for text, at in texts)
            # What was meant as an argument of the verb may be its last value.
            self.taken = f"{option.name} took '{group[-1]}'."
            self.values[self._key(option)] = (*self.values.get(self._key(option), ()), group)
        else:
            ((text, at),) = texts
            self.values[self._key(option)] = self._value(option, text, at)

    def _texts(self, option: Option, place: int) -> list[tuple[str, int]]:
        """The values after an option, with their places."""
        texts: list[tuple[str, int]] = []
        while self.number < len(self.arguments) and not (texts and not option.repeated):
            text = self.arguments[self.number]
            if is_option(text):
                break
            texts.append((text, self._place()))
            self.number += 1
        if not texts:
            after = self.arguments[self.number] if self.number < len(self.arguments) else None
            dashes = (
                f" A value with dashes in front is typed {option.name}={after}." if after not in (None, "--") else ""
            )
            raise self._error(f"{option.name} (argument {place}) has no value: {option.typed}.{dashes}")
        return texts

    def _value(self, option: Option, text: str, place: int) -> Any:
        assert option.value is not None
        at = f"argument {place}" if option.positional else f"{option.name} (argument {place})"
        if not text:
            raise self._error(f"{at} is empty: {option.typed}.")
        try:
            return option.value.read(text)
        except ValueError as error:
            raise self._error(f"{at}: {error}") from None

    def _option(self, name: str, place: int) -> Option:
        """The option of this name, or of this former name."""
        spelt = "--" + name.removeprefix("-").removeprefix("-").replace("_", "-")
        options = [option for option in self.declared.options if not option.positional]
        for option in options:
            if name.startswith("--") and spelt in (option.name, *option.former):
                return option
        raise self._error(f"argument {place} is '{name}', and no option of this verb.{self._meant(spelt, options)}")

    def _meant(self, spelt: str, options: Sequence[Option]) -> str:
        others = [
            leaf for leaf in self.root.leaves() if spelt in (option.name for option in declaration(leaf.of).options)
        ]
        if any(spelt in (option.name, *option.former) for option in options):
            return f" It has two dashes: {spelt}."
        if others:
            return f" It is one of {_and([f'`{leaf.name}`' for leaf in others])}."
        if spelt == "--version":
            return f" It stands alone: {self.root.typed} --version."
        match = nearest(spelt, [option.name for option in options])
        return next((f" Did you mean {option.typed}?" for option in options if option.name == match), "")

    def _key(self, option: Option) -> tuple[type, str]:
        return option.of, option.field

    def _place(self) -> int:
        return self.first + self.number

    def _error(self, message: str) -> UsageError:
        return self.verb.error(message)


def _built(declared: Declaration, values: dict[tuple[type, str], Any]) -> Any:
    inside = {name: _built(group, values) for name, group in declared.groups.items()}
    own = {
        option.field: values[option.of, option.field] for option in declared.own if (option.of, option.field) in values
    }
    build: Callable[..., Any] = declared.of
    return build(**own, **inside)


def _and(words: Sequence[str]) -> str:
    """
    >>> _and(["a"]), _and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
