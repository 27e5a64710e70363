"""A parsed MaxText configuration file: mesh axes, rules, sizes, the model, and settings that change the rules.

The several hundred other keys of such a file are only listed. A fault in a key that is read raises one ``InputError`` with its
position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from shardwright.core.findings.bounds import BOUNDS, is_integer, number_text
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Located, Position
from shardwright.core.layout.faults import shown
from shardwright.files.text import error_at, read_text
from shardwright.files.yaml_text import parse_yaml
from shardwright.interop.maxtext.reading.model_vocabulary import DIMS, MODEL_KEYS
from shardwright.interop.maxtext.reading.rules import Rule
from shardwright.interop.maxtext.reading.step_keys import STEP_KEYS
from shardwright.interop.maxtext.reading.vocabulary import SETTINGS, Kind

RULES, EVAL_RULES, MESH, DATA = "logical_axis_rules", "logical_axis_rules_for_eval", "mesh_axes", "data_sharding"
SIZE_KEY = re.compile(r"(?P<link>ici|dcn)_(?P<axis>\w+)_parallelism")
GROUPED = re.compile(r"[-+]?[0-9]+(_[0-9]+)+")
"""Grouped digits, as ``32_000``: a number to MaxText's YAML parser."""
GIVEN = "--given"
"""The source name of command-line values."""
RULE_FORM = "a rule is [name, axis], [name, [axis, axis]] or [name, []]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A YAML scalar and its position."""

    value: str | int | float | bool
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFile:
    """The contents of one file or of the command line. None: not set."""

    source: str
    mesh_axes: tuple[Scalar, ...] | None = None
    rules: tuple[Rule, ...] | None = None
    eval_rules: tuple[Rule, ...] | None = None
    data_sharding: tuple[Scalar, ...] | None = None
    sizes: Mapping[str, Scalar] = field(default_factory=dict)
    """By key, as ``ici_fsdp_parallelism``; -1 means the remaining devices."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)
    """The position of each key."""
    not_read: Mapping[str, Position] = field(default_factory=dict)
    """Keys that are not read, with their positions."""


def read_rule_file(path: str | Path) -> RuleFile:
    """One MaxText file, with any part of a configuration.

    Raises InputError for a file that cannot be read, is not YAML, or has invalid values for mesh, rules or sizes.
    """
    return parse_rule_file(read_text(path), str(path))


def parse_rule_file(text: str, source: str) -> RuleFile:
    """As ``read_rule_file``, from a text.

    >>> read = parse_rule_file("mesh_axes: [fsdp]\\nlogical_axis_rules: [[embed, fsdp], [norm, []]]", "mine.yml")
    >>> [str(line) for line in read.rules]
    ['[embed, [fsdp]]', '[norm, []]']
    """
    return _Reading(text, source).file()


def parse_given(texts: tuple[str, ...]) -> RuleFile:
    """The values of a command line of ``KEY=VALUE`` texts; values that are read are YAML, as in a file.

    Any MaxText key is allowed: those that change no layout are only listed. The line of a text is its index, from 1.
    Raises InputError for a text that is not KEY=VALUE, for a duplicate key, and for invalid values as in a file.
    """
    lines: dict[str, str] = {}
    not_read: dict[str, Position] = {}
    for number, text in enumerate(texts, start=1):
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise InputError(f"--given '{text}' is not KEY=VALUE, as in ici_expert_parallelism=8.")
        if key in lines:
            raise InputError(f"--given {key}: duplicate. Keep one.")
        lines[key] = f"{key}: {value}" if _is_read(key) else ""
        if not lines[key]:
            not_read[key] = Position(source=GIVEN, line=number, column=1)
    read = parse_rule_file("\n".join(lines.values()), GIVEN) if any(lines.values()) else RuleFile(source=GIVEN)
    return replace(read, not_read=not_read)


KINDS: Mapping[str, Kind] = {**SETTINGS, **MODEL_KEYS, **{key: kind for key, (kind, _, _) in STEP_KEYS.items()}}
"""The keys that are read in addition to mesh, rules and sizes, and the kinds of their values."""


def _flat(values: Mapping[str, Located]) -> dict[str, Located]:
    """Keys, and those of nested blocks with dots, as on a command line: ``lora.enable_lora``."""
    inside = {
        f"{key}.{inner}": value
        for key, node in values.items()
        if isinstance(node.value, Mapping)
        for inner, value in node.value.items()
    }
    return {**inside, **values}


def _is_read(key: str) -> bool:
    return key in (MESH, RULES, EVAL_RULES, DATA) or key in KINDS or SIZE_KEY.fullmatch(key) is not None


class _Reading:
    """Reads one text, which its errors quote."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source

    def file(self) -> RuleFile:
        top = parse_yaml(self.text, self.source)
        if not isinstance(top.value, Mapping):
            self.refuse(top, f"a configuration is a mapping of keys to values; this is {shown(top.value)}.")
        values = _flat(top.value)
        given = {key: value for key, value in values.items() if _is_read(key)}
        blocks = {key.partition(".")[0] for key in given if "." in key}
        unread = (key for key in values if key not in given and ("." not in key or key.partition(".")[0] in blocks))
        return RuleFile(
            source=self.source,
            mesh_axes=self.names(given[MESH], MESH) if MESH in given else None,
            rules=self.rules(given[RULES], RULES) if RULES in given else None,
            eval_rules=self.rules(given[EVAL_RULES], EVAL_RULES) if EVAL_RULES in given else None,
            data_sharding=self.flat(given[DATA]) if DATA in given else None,
            sizes={key: self.size(key, value) for key, value in given.items() if SIZE_KEY.fullmatch(key)},
            settings={
                key: self.setting(key, value)
                for key, value in given.items()
                if key in KINDS and not self.is_unset(key, value)
            },
            positions={key: top.key_position(key) for key in given},
            not_read={key: top.key_position(key.partition(".")[0]) for key in unread if key not in blocks},
        )

    def refuse(self, node: Located, message: str) -> NoReturn:
        length = len(str(node.value)) if isinstance(node.value, str | int | float) else 1
        raise error_at(message, self.text, node.position, length)

    def names(self, node: Located, what: str) -> tuple[Scalar, ...]:
        if not isinstance(node.value, tuple):
            self.refuse(node, f"'{what}' is a list of names; found {shown(node.value)}.")
        words = tuple(self.name(item, what) for item in node.value)
        for number, scalar in enumerate(words):
            if scalar.value in [earlier.value for earlier in words[:number]]:
                self.refuse(node.value[number], f"'{scalar.value}' is twice in '{what}'. Keep one.")
        return words

    def name(self, node: Located, what: str) -> Scalar:
        if not isinstance(node.value, str) or not node.value:
            self.refuse(node, f"'{what}' holds names; found {shown(node.value)}.")
        return Scalar(value=node.value, position=node.position)

    def rules(self, node: Located, what: str) -> tuple[Rule, ...]:
        if not isinstance(node.value, tuple):
            self.refuse(
                node, f"'{what}' is a list of rules; found {shown(node.value)}. {RULE_FORM}.".replace(". a", ": a")
            )
        return tuple(self.rule(item, what) for item in node.value)

    def rule(self, node: Located, what: str) -> Rule:
        items = node.value
        if not isinstance(items, tuple) or len(items) != 2:
            found = f"a list of {len(items)}" if isinstance(items, tuple) else shown(items)
            self.refuse(node, f"{RULE_FORM}; found {found} in '{what}'.")
        name = self.name(items[0], what)
        axes = items[1].value
        if axes is None:
            named: tuple[str, ...] = ()
        elif isinstance(axes, tuple):
            named = tuple(str(self.name(item, f"{what}: {name.value}").value) for item in axes)
        else:
            named = (str(self.name(items[1], f"{what}: {name.value}").value),)
        return Rule(name=str(name.value), axes=named, position=node.position)

    def flat(self, node: Located) -> tuple[Scalar, ...]:
        """The axes of the data: a list of lists of axes. MaxText uses all of them."""
        if isinstance(node.value, str):
            return (self.name(node, DATA),)
        if not isinstance(node.value, tuple):
            self.refuse(node, f"'{DATA}' is a list of axes, or of lists of them; found {shown(node.value)}.")
        return tuple(scalar for item in node.value for scalar in self.flat(item))

    def size(self, key: str, node: Located) -> Scalar:
        value = node.value
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
            self.refuse(
                node, f"'{key}' is a whole number of at least 1, or -1 for the remaining devices; found {shown(value)}."
            )
        self.bounded(key, node, value, "devices")
        return Scalar(value=value, position=node.position)

    def bounded(self, key: str, node: Located, value: int, counted: str) -> None:
        """Refuse a number above the bound, here, where its position is known."""
        bound = BOUNDS[counted]
        if value > bound.most:
            self.refuse(node, f"'{key}' is {number_text(value)}, and must be at most {bound.most:,}. {bound.fix}")

    def is_unset(self, key: str, node: Located) -> bool:
        """Whether a dimension is unset; MaxText then computes it."""
        return (key in MODEL_KEYS or key in STEP_KEYS) and (node.value is None or str(node.value).lower() == "none")

    def setting(self, key: str, node: Located) -> Scalar:
        value, kind = node.value, KINDS[key]
        if kind == "text" and value is None:
            return Scalar(value="", position=node.position)
        if kind == "a mapping" and isinstance(value, Mapping):
            return Scalar(value=", ".join(value), position=node.position)
        if kind == "a list" and isinstance(value, tuple):
            return Scalar(value=", ".join(str(item.value) for item in value), position=node.position)
        if isinstance(value, str) and kind in ("a number", "a whole number") and GROUPED.fullmatch(value):
            value = int(value.replace("_", ""))
        fits = {
            "text": isinstance(value, str),
            "true or false": isinstance(value, bool),
            "a number": isinstance(value, int | float) and not isinstance(value, bool),
            "a whole number": isinstance(value, int) and not isinstance(value, bool),
            "a list": False,
            "a mapping": False,
        }[kind]
        if not fits or isinstance(value, tuple | Mapping) or value is None:
            self.refuse(node, f"'{key}' is {'a ' if kind == 'text' else ''}{kind}; found {shown(value)}.")
        if key in DIMS and is_integer(value):
            self.bounded(key, node, value, "layers" if key.endswith("layers") else "elements")
        return Scalar(value=value, position=node.position)
