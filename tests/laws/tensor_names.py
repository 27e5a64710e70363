"""No layer that decides types the name of a model's tensor (``attention.queries``): names are those of the program that ``models`` writes,
and the core knows tensors by what operations make of them (``core/model/names.py``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shardwright.core.layout.roles import COMPONENTS

NAMELESS = ("core", "cost", "search", "report", "locks", "layouts", "training", "runs", "compiled", "cli")
"""The layers that type no name."""

TYPED: Mapping[str, frozenset[str]] = {
    # A word of the notation of policies (``--remat host=residual.stream``), by which a program must call its stream.
    "src/shardwright/core/model/names.py": frozenset({"residual.stream"}),
}
"""The names that a file may type."""

PARTS = (*COMPONENTS, "shared")
"""What the name of a tensor begins with, inside a layer."""

_NAME = re.compile(rf"(\w*layers\.)?({'|'.join(PARTS)})\.[a-z0-9_]+")
_BEGINNING = re.compile(rf"(\w*layers\.)?({'|'.join(PARTS)})\.")


def typed_names(root: Path, files: Iterable[Path]) -> list[str]:
    """Every name of a tensor that a nameless layer types."""
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        if name.startswith(tuple(f"src/shardwright/{layer}/" for layer in NAMELESS)):
            typed = _typed(ast.parse(file.read_text(encoding="utf-8")))
            wrong += [
                f"{name}:{line}: it types the tensor '{tensor}': ask the table for its name (core/model/names.py)"
                for line, tensor in typed
                if tensor not in TYPED.get(name, ())
            ]
    return wrong


def _typed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            beginning = str(node.values[0].value)
            if _BEGINNING.fullmatch(beginning):
                yield node.lineno, f"{beginning}*"
