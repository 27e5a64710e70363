"""Which layer may import what, as data, and the imports that the sources have.

A layer is a folder of src/shardwright; ``FRONT`` stands for the files directly in it. Every import statement counts,
inside functions and for type checking too. What a layer reaches only when it is called (``AT_CALL_TIME``: engines,
extras) it imports inside a function, or by name with ``importlib``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "shardwright"
FRONT = "(front door)"

_FOUNDATION = {"core", "storage", "training", "files", "init", "cost", "models", "checkpoint", "data"}

LAYERS: Mapping[str, frozenset[str]] = {
    layer: frozenset(permitted)
    for layer, permitted in {
        "core": set(),
        "locks": {"core"},
        "storage": {"core"},
        "training": {"core", "storage"},
        "files": {"core", "yaml"},
        "init": {"core", "numpy"},
        "cost": {"core"},
        "search": {"core", "cost", "files"},
        "models": {"core"},
        "layouts": {"core", "files"},
        "checkpoint": {"core", "storage", "numpy", "safetensors", "xxhash"},
        "data": {"core", "storage", "numpy", "grain", "tokenizers"},
        "runs": {"core", "storage", "training", "cost", "checkpoint", "data", "init", "numpy", "xxhash"},
        "engine_jax": {*_FOUNDATION, "runs", "numpy", "jax", "optax"},
        "engine_torch": {*_FOUNDATION, "runs", "numpy", "torch"},
        "compiled": {"core", "cost"},
        "interop": {"core", "storage", "training", "files", "models", "checkpoint", "numpy"},
        "report": {*_FOUNDATION, "search", "locks", "layouts", "compiled", "interop", "rich"},
        "cli": {*_FOUNDATION, "locks", "layouts", "compiled", "interop", "search", "report", "rich"},
        FRONT: {"core", "files", "layouts", "models"},
    }.items()
}
"""For each layer the other layers and the libraries that it may import, in addition to the standard library and itself."""

_ENGINES = frozenset({"engine_jax", "engine_torch"})

AT_CALL_TIME: Mapping[str, frozenset[str]] = {
    "report": _ENGINES,
    "cli": _ENGINES,
    # Optional dependencies that read and write another program's checkpoints on request.
    "engine_jax": frozenset({"orbax", "tensorstore"}),
    # An optional dependency with which a run writes its curves on request.
    "runs": frozenset({"tensorboardX"}),
    # The clients of object stores, for those who give a URL.
    "storage": frozenset({"fsspec"}),
    # The command line, where the package is run as a program.
    FRONT: _ENGINES | {"cli"},
}
"""Additional imports that a layer may have inside a function."""

STANDARD_LIBRARY_ONLY = ("core", "locks", "storage", "training", "cost", "models", "compiled")
"""Layers whose modules load only the standard library and each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name as written, absolute, and whether it is imported only when a function is called."""

    name: str
    line: int
    at_call_time: bool
    computed: bool = False


def layer_of(module: str) -> str:
    """
    >>> layer_of("shardwright.core.mesh.mesh"), layer_of("shardwright")
    ('core', '(front door)')
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else FRONT


def modules(source_folder: Path) -> dict[str, Path]:
    """Every module under ``source_folder`` by its dotted name."""
    found = {}
    for path in sorted(source_folder.rglob("*.py")):
        parts = path.relative_to(source_folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Imports of ``module`` that the table forbids, one sentence each."""
    layer = layer_of(module)
    wrong = []
    for found in _imports(ast.parse(source), module, is_package):
        permitted = LAYERS[layer] | (AT_CALL_TIME.get(layer, frozenset()) if found.at_call_time else frozenset())
        if found.computed:
            if not _ENGINES & AT_CALL_TIME.get(layer, frozenset()):
                wrong.append(f"{module}:{found.line}: '{layer}' imports by a computed name, which no table can check")
            continue
        target = _target(found.name)
        if target is not None and target != layer and target not in permitted:
            wrong.append(f"{module}:{found.line}: '{layer}' may not import '{found.name}'")
    return list(dict.fromkeys(wrong))


def _target(name: str) -> str | None:
    """The layer or library that a dotted name belongs to; None for the standard library."""
    top = name.split(".")[0]
    if top == PACKAGE:
        return layer_of(name)
    return None if top in sys.stdlib_module_names else top


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    inside_functions = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        at_call_time = id(node) in inside_functions
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name=alias.name, line=line, at_call_time=at_call_time)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package)
            for alias in node.names:
                # `from shardwright import core` imports a layer; `from shardwright.core import mesh` does too.
                name = f"{base}.{alias.name}" if base == PACKAGE else base
                yield Import(name=name, line=line, at_call_time=at_call_time)
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(name=argument.value, line=line, at_call_time=at_call_time)
            else:
                yield Import(name="?", line=line, at_call_time=at_call_time, computed=True)


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
