"""The state of one interpretation of a program, and its limits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.interop.torchtitan.program.modules import Module
from shardwright.interop.torchtitan.program.values import Scope, Unread

MAX_STEPS = 200_000
MAX_DEPTH = 40
"""Calls within calls."""


class RaisedError(Exception):
    """The program raises an error of its own."""

    def __init__(self, text: str, position: Position) -> None:
        self.text, self.position = text, position
        super().__init__(text)


class State:
    """``defaults``: the default fields of a class of another file, by the end of its dotted name.

    ``call``: evaluates a call (``calls.py``), which interprets functions, whose statements have expressions with calls.
    ``unknown_stores``: where a field named in ``watched`` is set on an object that is not known.
    """

    def __init__(
        self,
        defaults: Mapping[str, Mapping[str, Any]],
        watched: frozenset[str],
        call: Callable[[ast.Call, Scope, State], Any],
    ) -> None:
        self.defaults, self.watched, self.call = defaults, watched, call
        self.unknown_stores: list[tuple[str, Position]] = []
        self.modules: dict[Path, Scope] = {}
        self.texts: dict[str, str] = {}
        self.parameters: dict[tuple[int, Scope], Any] = {}
        self.steps = self.depth = 0

    def step(self, module: Module) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise InputError(
                f"{module.source}: too long to read without running it: more than {MAX_STEPS:,} steps. "
                "Write the degrees as numbers."
            )

    def defaults_of(self, kind: str) -> Mapping[str, Any] | None:
        """The known default fields of a class, by the end of its name."""
        for end, fields in self.defaults.items():
            if kind == end or kind.endswith(f".{end}"):
                return fields
        return None


def unread(scope: Scope, node: ast.AST, why: str) -> Unread:
    return Unread(why=why, position=scope.module.at(node))


def text_of(node: ast.AST, longest: int = 40) -> str:
    """The source text of an expression, truncated to ``longest`` characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
