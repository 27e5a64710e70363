"""The ``parallelism`` section of a TorchTitan configuration: TOML, JSON, or the Python that builds a ``ParallelismConfig``.

Python is read and never run: the values must be written out. Whatever is wrong is one ``InputError`` with its place.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shardwright.core.errors import InputError
from shardwright.core.layout_faults import shown
from shardwright.core.position import Position
from shardwright.files.json_text import parse_json
from shardwright.files.text import error_at, place_of, read_text
from shardwright.interop.torchtitan.words import DEGREES, EARLIER_SECTIONS, GONE, SECTION, SEQUENCE

CALL = "ParallelismConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a file says of parallelism: each option as written, and where it stands."""

    source: str
    values: Mapping[str, Any]
    positions: Mapping[str, Position] = field(default_factory=dict)

    def degree(self, name: str) -> int:
        return int(self.values.get(name, DEGREES[name]))

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.values.get(SEQUENCE, True))


def read_section(path: str, config: str | None = None) -> Section:
    """The section of a file. ``config``: the function of a Python file whose configuration is meant.

    Raises InputError for a file that cannot be read, has no such section, or values that are no degrees.
    """
    return parse_section(read_text(path), path, config)


def parse_section(text: str, source: str, config: str | None = None) -> Section:
    """As ``read_section``, from a text.

    >>> found = parse_section("[parallelism]\\ntensor_parallel_degree = 8\\n", "llama.toml")
    >>> found.degree("tensor_parallel_degree"), str(found.positions["tensor_parallel_degree"])
    (8, 'llama.toml:2:1')
    """
    if source.endswith(".py"):
        found = _python(text, source, config)
    elif source.endswith(".json") or (not source.endswith(".toml") and text.lstrip().startswith("{")):
        parse_json(text, source)
        found = _from_tables(json.loads(text), text, source, quoted=True)
    else:
        found = _from_tables(_toml(text, source), text, source, quoted=False)
    for name, value in found.values.items():
        _check(name, value, text, found.positions[name])
    return found


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        message = re.sub(r" \(at .*\)", "", str(error))
        message = f"not TOML: {message[0].lower()}{message[1:]}."
        if place is None:
            raise InputError(f"{source}: {message}") from None
        position = Position(source=source, line=int(place[1]), column=int(place[2]))
        raise error_at(message, text, position) from None


def _from_tables(top: Any, text: str, source: str, *, quoted: bool) -> Section:
    if not isinstance(top, dict):
        raise InputError(
            f"{source}: a configuration has sections; this is {'a list' if isinstance(top, list) else shown(top)}."
        )
    section = top.get(SECTION, {})
    if not isinstance(section, dict):
        raise InputError(f"{source}: '{SECTION}' is a section of options; found {shown(section)}.")
    values = dict(section)
    for name in EARLIER_SECTIONS:
        earlier = top.get(name)
        if isinstance(earlier, dict):
            values.update((key, value) for key, value in earlier.items() if key in (*DEGREES, *GONE, SEQUENCE))
    if not values and SECTION not in top:
        raise InputError(f"{source}: no section '{SECTION}', and no degree of TorchTitan's in any other.")
    return Section(
        source=source, values=values, positions={key: _place(key, text, source, quoted=quoted) for key in values}
    )


def _place(key: str, text: str, source: str, *, quoted: bool) -> Position:
    """Where a key is given: its last line, since a section stands after those of earlier versions."""
    pattern = rf'"{re.escape(key)}"\s*:' if quoted else rf"^\s*(?P<key>{re.escape(key)})\s*="
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if not found:
        return Position(source=source, line=1, column=1)
    start = found[-1].start() if quoted else found[-1].start("key")
    return place_of(text, start, source)


def _python(text: str, source: str, config: str | None) -> Section:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        position = Position(source=source, line=error.lineno or 1, column=error.offset or 1)
        raise error_at(f"not Python: {error.msg}.", text, position) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not readable: {error}.") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if config is not None:
        if config not in functions:
            raise InputError(f"{source}: no function '{config}'. It has: {', '.join(functions) or 'none'}.")
        calls = list(_calls(functions[config]))
        scope: ast.AST = functions[config]
    else:
        calls, scope = list(_calls(tree)), tree
        if len(calls) > 1:
            those = [name for name, node in functions.items() if any(True for _ in _calls(node))]
            known = f" Known: {', '.join(those)}." if those else ""
            raise InputError(f"{source}: {len(calls)} configurations. Say which with --config NAME.{known}")
    if not calls:
        raise InputError(f"{source}: nothing here builds a {CALL}.")
    values: dict[str, Any] = {}
    positions: dict[str, Position] = {}
    for name, value, node in (*_keywords(calls[-1]), *_assigned(scope)):
        if not isinstance(value, ast.expr):
            values[name] = value
        elif name in (*DEGREES, *GONE, SEQUENCE):
            position = Position(source=source, line=value.lineno, column=value.col_offset + 1)
            raise error_at(
                f"'{name}' is worked out by the program, which is read and not run. Write a number.", text, position
            )
        else:
            values[name] = None
        positions[name] = Position(source=source, line=node.lineno, column=node.col_offset + 1)
    return Section(source=source, values=values, positions=positions)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == CALL:
            yield node


def _keywords(call: ast.Call) -> Iterator[tuple[str, Any, ast.keyword]]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _constant(keyword.value), keyword


def _assigned(scope: ast.AST) -> Iterator[tuple[str, Any, ast.Assign]]:
    """``config.parallelism.NAME = value``."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if isinstance(target.value, ast.Attribute) and target.value.attr == SECTION:
                yield target.attr, _constant(node.value), node


def _constant(node: ast.expr) -> Any:
    """A value that is written out; the expression itself where it is not."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return node


def _check(name: str, value: Any, text: str, position: Position) -> None:
    def refuse(needed: str) -> NoReturn:
        raise error_at(f"'{name}' is {needed}; found {shown(value)}.", text, position, len(name))

    if name in (*DEGREES, *GONE) and (not isinstance(value, int) or isinstance(value, bool)):
        refuse("a whole number")
    if name == SEQUENCE and not isinstance(value, bool):
        refuse("true or false")
