"""Laws about the text of source files. Every function returns the files that violate one law, with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwright.core.layout.roles import COMPONENTS

MAX_LINES = 400

LONGER: Mapping[str, int] = {}
"""Files that may be longer than ``MAX_LINES``, with their length. This list only shrinks."""

_EMPTY_NAME = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc)($|_)")


def python_files(root: Path) -> list[Path]:
    """The Python files of ``src`` and ``tests``."""
    return [path for folder in ("src", "tests") for path in sorted((root / folder).rglob("*.py"))]


def too_long(root: Path, files: Iterable[Path], longer: Mapping[str, int] = LONGER) -> list[str]:
    """Files above the limit, and exceptions that grew or are no longer needed."""
    lengths = {path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in files}
    wrong = []
    for name, length in lengths.items():
        if length > longer.get(name, MAX_LINES):
            wrong.append(
                f"{name} has {length} lines, {longer.get(name, MAX_LINES)} at most: look for the second concept"
            )
    for name, length in longer.items():
        if lengths.get(name, 0) < length:
            wrong.append(f"{name} has {lengths.get(name, 0)} lines now: shorten its entry or take it off the list")
    return wrong


def named_after_nothing(root: Path, files: Iterable[Path]) -> list[str]:
    """Files and folders with a name that could mean anything."""
    return [
        f"{path.relative_to(root).as_posix()}: name it after the one thing it holds"
        for path in files
        if any(_EMPTY_NAME.search(Path(part).stem) for part in path.relative_to(root).parts)
    ]


def without_docstring(root: Path, files: Iterable[Path]) -> list[str]:
    """Modules without a docstring."""
    return [
        f"{path.relative_to(root).as_posix()} has no docstring"
        for path in files
        if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]


def mutable_dataclasses(root: Path, files: Iterable[Path]) -> list[str]:
    """Dataclasses that are not frozen and slotted."""
    wrong = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(function) not in ("dataclass", "dataclasses.dataclass"):
                    continue
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                given = {word.arg for word in keywords if ast.unparse(word.value) == "True"}
                for needed in sorted({"frozen", "slots"} - given):
                    wrong.append(f"{path.relative_to(root).as_posix()}:{node.lineno}: {node.name} needs {needed}=True")
    return wrong


REFUSING = {
    "engine_jax/io/mesh.py": "devices that are there",
    "engine_jax/own_program/shardings.py": "a user's own tree",
    "engine_jax/own_program/leaves.py": "a user's own tree",
    "engine_jax/own_program/store.py": "a user's own tree",
    "engine_jax/training/processes.py": "processes that connect",
    "engine_jax/compile/target.py": "compilers that are installed",
    "engine_torch/own_program/": "a user's own module",
    "engine_torch/modules/": "a user's own program, and its checkpoint",
    "engine_torch/dcp/plan.py": "a user's own state",
    "engine_torch/dcp/saving.py": "a user's own state",
    "engine_torch/dcp/loading.py": "a user's own state",
    "engine_jax/orbax_folder/folder.py": "a user's own folder",
    "engine_jax/orbax_folder/importing.py": "a user's own folder",
    "engine_jax/orbax_folder/exporting.py": "a user's own folder",
    "engine_torch/dcp_folder/program.py": "a user's own folder",
    "engine_torch/dcp_folder/importing.py": "a user's own folder",
    "engine_torch/dcp_folder/exporting.py": "a user's own folder",
    "engine_torch/training/run.py": "ranks that are there",
    "engine_jax/training/named_optimizer.py": "the optimizers of the installed library",
    "engine_torch/training/named_optimizer.py": "the optimizers of the installed library",
}
"""The files and folders of the engines that may refuse a request, and the facts that only the machine or the user's program has."""


def refusing_engines(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of an engine that raise a user's error. What an engine does not run must be a finding of the plan."""
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        inside = name.removeprefix("src/shardwright/")
        if inside.startswith("engine_") and not inside.startswith(tuple(REFUSING)):
            raised = re.findall(r"raise (?:InputError|FindingsError)\b", file.read_text(encoding="utf-8"))
            wrong += [f"{name}: an engine refuses: make it a finding of the plan (core/checks/engines.py)"] * bool(
                raised
            )
    return wrong


DERIVED = {"contracted", "summed", "feeds", "beside", "reads", "storage", "torch_dims", "ends_layer", "hugging_face"}
"""Fields of a table's rows that follow from the program of a model (``core/program/``)."""


def typed_rows(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of ``models`` that type what a row of a table derives from the program."""
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        if not name.startswith("src/shardwright/models/"):
            continue
        calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        typed = sorted({word.arg for call in calls for word in call.keywords if word.arg in DERIVED})
        wrong += [f"{name} types {', '.join(map(str, typed))}: it follows from the program"] * bool(typed)
    return wrong


WALKING = tuple(f"src/shardwright/engine_jax/{room}/" for room in ("model", "attention", "layers", "experts"))
"""The rooms of engines that walk a program, from which they have every name."""

_TENSOR = re.compile(rf"(?:{'|'.join((*COMPONENTS, 'shared'))})\.[a-z_]+")


def knowing_a_family(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of ``WALKING`` that type a tensor's name, or import what a family is made of."""
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        if not name.startswith(WALKING):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        wrong += [f"{name} types '{text}': it is in the walk" for text in sorted(filter(_TENSOR.fullmatch, texts))]
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        families = sorted(one for one in imports if one.startswith("shardwright.models.") and ".layers." not in one)
        wrong += [f"{name} imports {one}: a primitive knows no family" for one in families]
    return wrong


_DIMS = re.compile(r"^_?[a-z][a-z0-9_]*_([A-Z]{1,6})$")


def dims_without_legend(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of an engine with shape suffixes whose letters the module's docstring does not explain.

    The suffix of ``x_BLM`` has a letter for each dim; the docstring has a word for each letter, as in "B batch, L length".
    """
    wrong = []
    for file in files:
        name = file.relative_to(root).as_posix()
        if not name.startswith("src/shardwright/engine_"):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        names += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
        letters = {letter for one in names if (found := _DIMS.match(one)) for letter in found[1]}
        legend = ast.get_docstring(tree) or ""
        missing = sorted(letter for letter in letters if not re.search(rf"\b{letter}\b", legend))
        if missing:
            wrong.append(f"{name}: its docstring does not say which dims {', '.join(missing)} are")
    return wrong
