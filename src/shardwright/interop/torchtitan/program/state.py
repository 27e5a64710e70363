"""What one reading of a program has at hand, and how much it may still do."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.interop.torchtitan.program.modules import Module
from shardwright.interop.torchtitan.program.values import Scope, Unread

MOST_STEPS = 200_000
DEEPEST = 40
"""Calls within calls."""


class EndedError(Exception):
    """The program raises an error of its own."""

    def __init__(self, text: str, position: Position) -> None:
        self.text, self.position = text, position
        super().__init__(text)


class State:
    """``defaults``: the fields that a class of another file has where nobody gives them, by its dotted name's end.

    ``call``: what a call gives (``calls.py``), which looks into functions, whose statements have expressions with calls.
    ``strays``: where a field of a name in ``watched`` is set on something that is not read.
    """

    def __init__(
        self,
        defaults: Mapping[str, Mapping[str, Any]],
        watched: frozenset[str],
        call: Callable[[ast.Call, Scope, State], Any],
    ) -> None:
        self.defaults, self.watched, self.call = defaults, watched, call
        self.strays: list[tuple[str, Position]] = []
        self.modules: dict[Path, Scope] = {}
        self.texts: dict[str, str] = {}
        self.parameters: dict[tuple[int, Scope], Any] = {}
        self.steps = self.depth = 0

    def step(self, module: Module) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise InputError(
                f"{module.source}: too long to read without running it: more than {MOST_STEPS:,} steps of its program. "
                "Write the degrees out."
            )

    def defaults_of(self, kind: str) -> Mapping[str, Any] | None:
        """The fields that a class is known to have where none is given, by the end of its name."""
        for end, fields in self.defaults.items():
            if kind == end or kind.endswith(f".{end}"):
                return fields
        return None


def unread(scope: Scope, node: ast.AST, why: str) -> Unread:
    return Unread(why=why, position=scope.module.at(node))


def text_of(node: ast.AST, longest: int = 40) -> str:
    """An expression as it is written, cut where it is long."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
