"""Which room of a layer may import which, as data, and the imports that the sources have.

A room is a folder of a layer; ``""`` stands for the files that lie directly in the layer. Each room may import those that
stand before it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from tests.laws.layers import PACKAGE, absolute

MOST_FILES = 12

ENGINE = ("io", "precision", "layers", "attention", "experts", "lowering", "model", "training")

ROOMS: Mapping[str, tuple[str, ...]] = {
    "core": (
        "engines",
        "findings",
        "mesh",
        "recipes",
        "model",
        "policies",
        "boxes",
        "layout",
        "program",
        "schedules",
        "stages",
        "resolution",
        "quantization",
        "estimate",
        "plan",
        "pipeline",
        "checks",
        "",
    ),
    "cost": ("hardware", "steps", "choices", ""),
    "search": ("space", ""),
    "models": ("parts", "layers", "deepseek3", "llama3", "mixtral", ""),
    "checkpoint": ("retention", "format", "folder", "reading", "exchange", "writing", ""),
    "runs": ("processes", "metrics", "", "own_program"),
    "engine_jax": (*ENGINE[:-1], "stages", "training", "compile", "own_program", "orbax_folder", ""),
    "engine_torch": (
        *ENGINE[:-1],
        "stages",
        "training",
        "dry_run",
        "own_program.steps",
        "own_program.operands",
        "own_program",
        "modules.parts",
        "modules.attention",
        "modules.codes",
        "modules",
        "dcp",
        "dcp_folder",
        "",
    ),
    "compiled": ("text", "reading", "agreement", "findings", ""),
    "interop": (
        "",
        "hugging_face",
        "hugging_face.weights.files",
        "hugging_face.weights",
        "maxtext.reading",
        "maxtext.resolution",
        "maxtext.checks",
        "maxtext",
        "torchtitan.program",
        "torchtitan",
    ),
    "report": ("text", "plan", "compile", "review", "interop", ""),
    "cli": ("arguments", "typed", "interop", "running", "reviewing", "searching", ""),
}

ONE_FOR_EACH = ("core/checks", "compiled/findings", "interop/maxtext/checks", "layouts")
"""Rooms of checks and presets: one file for each, without a limit."""


def crowded(package: Path) -> list[str]:
    """Folders with more than ``MOST_FILES`` files."""
    found = []
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        name, number = folder.relative_to(package).as_posix(), len(list(folder.glob("*.py")))
        if number > MOST_FILES and name not in ONE_FOR_EACH:
            found.append(f"{name} has {number} files, {MOST_FILES} at most: look for the rooms in it")
    return found


def unlisted(package: Path) -> list[str]:
    """Folders whose docstring omits one of their files, or lists one that does not exist."""
    found = []
    for folder in sorted(path for path in package.rglob("*") if (path / "__init__.py").exists()):
        name = folder.relative_to(package).as_posix()
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        listed = {line.split()[0] for line in docstring.splitlines() if re.match(r"\w+[.]py ", line)}
        there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        found += [f"{name} does not say what {file} is" for file in sorted(there - listed)]
        found += [f"{name} says what {file} is, which is not there" for file in sorted(listed - there)]
    return found


def without_a_place(modules: Mapping[str, Path], rooms: Mapping[str, tuple[str, ...]] = ROOMS) -> list[str]:
    """Rooms that the table lacks, and rooms in the table that no longer exist."""
    there = {(layer, room) for name, path in modules.items() for layer, room in [place(name, path)] if layer}
    listed = {(layer, room) for layer, order in rooms.items() for room in order}
    layers_with_rooms = {layer for layer, room in there if room}
    new = {
        f"{layer}: room '{room}' is not in the table" for layer, room in there - listed if layer in layers_with_rooms
    }
    return sorted(new | {f"{layer}: room '{room}' is gone" for layer, room in listed - there})


def backwards(modules: Mapping[str, Path], rooms: Mapping[str, tuple[str, ...]] = ROOMS) -> list[str]:
    """Imports from a later room of the order."""
    wrong = []
    for name, path in modules.items():
        layer, room = place(name, path)
        for target in sorted(_targets(name, path, modules)):
            other_layer, other = place(target, modules[target])
            if layer != other_layer or room == other or layer not in rooms:
                continue
            order = rooms[layer]
            if room in order and other in order and order.index(other) > order.index(room):
                wrong.append(f"{name}: '{room or layer}' is before '{other or layer}' and may not import {target}")
    return wrong


def cycles(modules: Mapping[str, Path]) -> list[str]:
    """Import cycles, each once."""
    graph = {name: _targets(name, path, modules) for name, path in modules.items()}
    found: list[str] = []
    done: set[str] = set()

    def walk(name: str, chain: list[str]) -> None:
        if name in chain:
            cycle = chain[chain.index(name) :]
            if not any(set(cycle) == set(one.split(" -> ")) for one in found):
                found.append(" -> ".join(cycle))
            return
        if name in done:
            return
        for target in sorted(graph[name]):
            walk(target, [*chain, name])
        done.add(name)

    for name in graph:
        walk(name, [])
    return found


def place(name: str, path: Path) -> tuple[str, str]:
    """The layer and the room of a module; no layer for modules directly in the package."""
    parts = name.split(".")[1:]
    folders = parts if path.stem == "__init__" else parts[:-1]
    return (folders[0], ".".join(folders[1:])) if folders else ("", "")


def _targets(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of this package that a module imports, at any level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name, path.stem == "__init__")
            found |= {one if (one := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {one for one in found if one in modules and one.startswith(f"{PACKAGE}.") and one != name}


def drawn(package: Path) -> str:
    """The folders of the package as a tree, each with the first line of its docstring."""
    rows = []
    for path in sorted(package.rglob("__init__.py")):
        folder = path.parent.relative_to(package)
        if folder.parts:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append(("  " * (len(folder.parts) - 1) + f"{folder.name}/", docstring.partition("\n")[0]))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {line}\n" for name, line in rows)
