"""Sets any dimension of a model from text: ``num_layers=2``, ``q_lora=none``, ``rope.kind=default``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from math import isfinite
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwright.core.findings.bounds import integer_of, within
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean

Config = TypeVar("Config")

WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def overridden(model: str, config: Config, overrides: Mapping[str, str]) -> Config:
    """A config with some dimensions replaced. Raises InputError for an unknown dimension or an invalid value.

    >>> from shardwright.models.llama3.sizes import SIZES
    >>> overridden("llama3-test", SIZES["test"].config, {"num_layers": "2", "rope.kind": "default"}).num_layers
    2
    """
    changes: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    try:
        for key, text in overrides.items():
            outer, _, inner = key.partition(".")
            nested: Any = getattr(config, outer, None) if outer in _names(config) else None
            if inner and is_dataclass(nested):
                inside.setdefault(outer, {})[inner] = _value(key, inner, nested, text)
            else:
                changes[key] = _value(key, key, config, text)
        # All values of a nested config at once: they may be valid together and invalid one by one.
        for outer, values in inside.items():
            changes[outer] = _with(getattr(config, outer), **values)
        return _with(config, **changes)
    except InputError as error:
        option = " ".join(f"{key}={text}" for key, text in overrides.items())
        raise InputError(f"{model} with --set {option}: {error}") from None


def _with(config: Any, **changes: Any) -> Any:
    return replace(config, **changes)


def _value(key: str, name: str, config: Any, text: str) -> Any:
    settable = {field.name for field in fields(config) if not is_dataclass(getattr(config, field.name))}
    if name not in settable:
        prefix = key[: len(key) - len(name)]
        inside = {f"{outer}.{inner}" for outer in _names(config) - settable for inner in _names(getattr(config, outer))}
        known = sorted(prefix + each for each in settable | inside)
        raise InputError(f"no dimension '{key}'. {did_you_mean(key, known)}")
    kind = get_type_hints(type(config))[name]
    if get_origin(kind) in (Union, UnionType):
        if text.lower() == "none":
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise InputError(f"{key} is '{text}', and must be one of {', '.join(get_args(kind))}.")
        return text
    if kind is bool:
        known = {"true": True, "false": False}
        if text.lower() in known:
            return known[text.lower()]
        raise InputError(f"{key} is '{text}', and must be {WORDS[bool]}.")
    try:
        value = integer_of(text) if kind is int and isinstance(text, str) else kind(text)
    except ValueError:
        raise InputError(f"{key} is '{text}', and must be {WORDS[kind]}.") from None
    if isinstance(value, float) and not isfinite(value):
        raise InputError(f"{key} is '{text}', and must be {WORDS[kind]} that is finite.")
    if kind is int:
        within(key, value, "layers" if name.endswith("layers") else "elements")
    return value


def _names(config: Any) -> set[str]:
    return {field.name for field in fields(config)}
