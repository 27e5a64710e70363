"""No layer that decides asks which engine there is: what an engine does otherwise is a property of it (``core/engines``).

A question is a comparison of an engine, or a choice by it: ``request.engine == "jax"``, ``engine in ON_TPUS``, ``SCHEDULES_OF[request.engine]``,
``match request.engine``. So too of a name that stands for one (``request.engine == JAX``), of an engine's whole row of properties, and of
the words by which an engine is shown (``properties.framework``). The name of an engine is written in ``core/engines`` alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwright.core.engines.engines import ENGINES

DECIDING = ("core", "cost", "search", "models", "layouts", "locks", "report")
"""The layers that ask for no engine. The command line loads one by its name, and other programs are of one."""

HOME = "src/shardwright/core/engines/"

SHOWN = ("title", "framework")
"""The properties that are words for people."""


def engine_questions(root: Path, files: Iterable[Path]) -> list[str]:
    """Every place at which a deciding layer names an engine or asks for one."""
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        if name.startswith(HOME) or not name.startswith(tuple(f"src/shardwright/{layer}/" for layer in DECIDING)):
            continue
        lines = sorted(set(_questions(ast.parse(file.read_text(encoding="utf-8")))))
        wrong += [f"{name}:{line}: {what}: read a property of it (core/engines/properties.py)" for line, what in lines]
    return wrong


def _questions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ENGINES:
            yield node.lineno, f"it names the engine '{node.value}'"
        elif (isinstance(node, ast.Compare) and any(map(_is_an_engine, _operands(node)))) or (
            isinstance(node, ast.Match) and _is_an_engine(node.subject)
        ):
            yield node.lineno, "it compares an engine"
        elif isinstance(node, ast.Subscript) and _is_an_engine(node.slice) and not _is_the_table(node.value):
            yield node.lineno, "it chooses by an engine"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_an_engine(node.func.value):
                yield node.lineno, "it takes an engine's name apart"
            elif node.func.attr == "get" and any(map(_is_an_engine, node.args[:1])):
                yield node.lineno, "it chooses by an engine"


def _operands(node: ast.Compare) -> Iterator[ast.expr]:
    for operand in (node.left, *node.comparators):
        yield from operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else (operand,)


def _is_an_engine(node: ast.expr) -> bool:
    """The name of an engine, its properties as a whole, or the words by which it is shown."""
    if isinstance(node, ast.Subscript):
        return _is_the_table(node.value)
    if isinstance(node, ast.Attribute) and node.attr in SHOWN:
        return _is_an_engine(node.value)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("engine", "properties", "DEFAULT_ENGINE")


def _is_the_table(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "ENGINES"
