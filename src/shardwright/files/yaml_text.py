"""YAML to values with their line and column.

Built from the parser's events, because a document that PyYAML has composed no longer has anchors, aliases and tags. Only
PyYAML's own parser is used, never libyaml: the two differ in their messages and marks, and a layout of eight lines
takes a millisecond. ``scalar`` defines the values of unquoted words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import yaml

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Located, Position
from shardwright.files.scalar import plain_value
from shardwright.files.text import error_at, place_of, read_text

MAX_BYTES = 4 * 1024 * 1024
"""The largest file that is read: the parser takes seconds for a MiB."""

MAX_DEPTH = 50
"""Levels of nesting. A layout has four."""

_EXPLAINED: tuple[tuple[str, str], ...] = (
    (
        r"mapping values are not allowed here",
        "a ': ' is inside a value, or the lines are not aligned, or a space is missing after the ':' of the line before.",
    ),
    (r"found character '\\t' that cannot start any token", "a tab is at the start of a value. Indent with spaces."),
    (r"found character '(.)' that cannot start any token", "a word cannot begin with '{1}'. Put it in quotes."),
    (r"found unexpected end of stream", "the quote that opens here is never closed."),
    (r"could not find expected ':'", "a ':' is missing after this key."),
    (
        r"expected <block end>, but found '<block mapping start>'",
        "this line is indented differently from its neighbours. Align it with them.",
    ),
    (
        r"expected <block end>, but found '(-|<block sequence start>)'",
        "a list begins among the keys of a mapping. Indent it under a key of its own.",
    ),
    (
        r"expected <block end>, but found '\?'",
        "a key of a mapping is in a list. Indent it, or begin the line with '- '.",
    ),
    (r"expected <block end>, but found '<scalar>'", "the value before this has ended. Put the whole value in quotes."),
    (
        r"expected ',' or '(.)', but got '<stream end>'",
        "the bracket that opens here is never closed; '{1}' is missing.",
    ),
    (
        r"expected ',' or '(.)', but got .*",
        "a ',' is missing before this, or the '{1}' that closes the bracket of line {line}.",
    ),
    (r"expected the node content, but found '<stream end>'", "the text ends where a value is expected."),
    (r"expected the node content, but found '(.)'", "a value is expected here; found '{1}'."),
)
"""PyYAML's messages for common mistakes, as patterns, and ours. ``{line}`` is the line of the opening bracket."""

_AT_CONTEXT = ("found unexpected end of stream", "', but got '<stream end>'", "could not find expected ':'")
"""Problems shown at the open bracket, quote or key, not at the position where the parser stopped."""


def read_yaml(path: str | Path) -> Located:
    """The value of a YAML file. Raises InputError for a file that cannot be read, is not YAML, or is larger than ``MAX_BYTES``."""
    return parse_yaml(read_text(path, MAX_BYTES), str(path))


def parse_yaml(text: str, source: str = "<text>") -> Located:
    """The one document of a YAML text.

    Keys are text as written (``on:`` is the key ``on``). Raises InputError with the position, the line and a caret for
    a text that is not YAML, for a duplicate key, and for features that a file reviewed by people should
    not need: anchors, aliases, merge keys, tags, keys that are not a word, and a second document.

    >>> layout = parse_yaml("mesh: {fsdp: auto, expert: 4}", "ep.yaml")
    >>> str(layout.value["mesh"].value["expert"].position)
    'ep.yaml:1:28'
    """
    reader = _Reader(text, source)
    try:
        return reader.document()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, source) from None
    except yaml.reader.ReaderError as error:
        position = place_of(text, error.position, source)
        code = ord(error.character) if isinstance(error.character, str) else error.character
        raise error_at(f"not YAML: the character U+{code:04X} is not allowed in a text.", text, position) from None


class _Reader:
    """One pass over the events of a text."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))

    def document(self) -> Located:
        next(self.events)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            what = "the file is empty" if not self.text.strip() else "the file has only comments"
            raise InputError(f"{self.source}: {what}; it should hold YAML.")
        value = self.value(next(self.events), depth=1)
        next(self.events)
        second = next(self.events)
        if not isinstance(second, yaml.StreamEndEvent):
            raise self.error("a second document begins here; a file has one. Move it to a file of its own.", second, 3)
        return value

    def value(self, event: yaml.Event, depth: int) -> Located:
        self.refuse_anchors_and_tags(event)
        if depth > MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} levels deep.", event)
        position = self.position(event)
        if isinstance(event, yaml.ScalarEvent):
            return Located(value=plain_value(event.value) if _is_plain(event) else event.value, position=position)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Located] = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                items.append(self.value(item, depth + 1))
            return Located(value=tuple(items), position=position)
        return self.mapping(position, depth)

    def mapping(self, position: Position, depth: int) -> Located:
        values: dict[str, Located] = {}
        key_positions: dict[str, Position] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.key(event)
            if key in values:
                raise self.error(
                    f"'{key}' appears twice in this mapping, first on line {key_positions[key].line}. Keep one.",
                    event,
                    len(key),
                )
            key_positions[key] = self.position(event)
            value_event = next(self.events)
            values[key] = self.value(value_event, depth + 1)
            if ":" in key and _is_plain(event) and _is_plain(value_event) and not value_event.value:
                raise self.error(f"'{key}' has no value. Write a space after the ':'.", event, len(key))
        return Located(value=values, position=position, key_positions=key_positions)

    def key(self, event: yaml.Event) -> str:
        self.refuse_anchors_and_tags(event)
        if not isinstance(event, yaml.ScalarEvent):
            raise self.error("a key must be a word; this is a list or a mapping.", event)
        if event.value == "<<" and _is_plain(event):
            raise self.error("merge keys ('<<') are not read. Write the entries out.", event, 2)
        if not event.value:
            raise self.error("a key is missing before this ':'.", event)
        return event.value

    def refuse_anchors_and_tags(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise self.error(
                f"aliases ('*{event.anchor}') are not read. Write the value out.", event, len(event.anchor) + 1
            )
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise self.error(
                f"anchors ('&{event.anchor}') are not read. Write the value out where it is used.",
                event,
                len(event.anchor) + 1,
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            raise self.error(f"tags ('{short}') are not read. Leave it out; quotes make a text of a number.", event)

    def position(self, event: yaml.Event) -> Position:
        return Position(source=self.source, line=event.start_mark.line + 1, column=event.start_mark.column + 1)

    def error(self, message: str, event: yaml.Event, length: int = 1) -> InputError:
        return error_at(message, self.text, self.position(event), length)


def _is_plain(event: yaml.Event) -> TypeGuard[yaml.ScalarEvent]:
    """Whether a scalar is unquoted, so that its type is derived from its text."""
    return isinstance(event, yaml.ScalarEvent) and event.implicit[0]


def _syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> InputError:
    problem = error.problem or "it cannot be read"
    mark = error.problem_mark
    if error.context_mark is not None and problem.endswith(_AT_CONTEXT):
        mark = error.context_mark
    assert mark is not None, "every error of the scanner and the parser has a mark"
    position = Position(source=source, line=mark.line + 1, column=mark.column + 1)
    return error_at(f"not YAML: {_explain(problem, error)}", text, position)


def _explain(problem: str, error: yaml.MarkedYAMLError) -> str:
    opened = error.context_mark.line + 1 if error.context_mark is not None else 1
    for pattern, explained in _EXPLAINED:
        if match := re.fullmatch(pattern, problem):
            return explained.format(match[0], *match.groups(), line=opened)
    return f"{problem}, {error.context}." if error.context else f"{problem}."
