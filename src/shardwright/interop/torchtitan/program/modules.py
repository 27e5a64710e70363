"""Python files, and the names that one imports from another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.files.text import error_at, read_text

REGISTRY = "config_registry"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    """A parsed Python file."""

    source: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> Position:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        # ast counts bytes of UTF-8.
        lines = self.text.splitlines()
        before = lines[line - 1].encode()[:column].decode(errors="replace") if line <= len(lines) else ""
        return Position(source=self.source, line=line, column=len(before) + 1)


def parse_module(text: str, source: str) -> Module:
    """Raises InputError for a text that is not Python."""
    try:
        return Module(source=source, text=text, tree=ast.parse(text))
    except SyntaxError as error:
        position = Position(source=source, line=error.lineno or 1, column=error.offset or 1)
        raise error_at(f"not Python: {error.msg}.", text, position) from None
    except (RecursionError, MemoryError):
        raise InputError(f"{source}: not readable: its expressions are nested too deeply.") from None
    except ValueError as error:
        raise InputError(f"{source}: not readable: {error}.") from None


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """The bound name, the module with a leading dot for each level, and the name in it ("" for the module itself)."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, "." * node.level + (node.module or ""), alias.name
        elif alias.asname:
            yield alias.asname, alias.name, ""
        else:
            yield alias.name.partition(".")[0], alias.name.partition(".")[0], ""


def file_of(module: str, source: str) -> Path | None:
    """The file of a module that is read with ``source``: one in the same folder, or a registry of configurations in its tree."""
    here = Path(source).parent
    level = len(module) - len(module.lstrip("."))
    parts = module.lstrip(".").split(".") if module.lstrip(".") else []
    if not parts:
        return None
    folders = [here.joinpath(*[".."] * (level - 1))] if level else [here, *here.resolve().parents]
    for folder in folders:
        path = folder.joinpath(*parts).with_suffix(".py")
        same_folder = path.parent.resolve() == here.resolve()
        if (same_folder or parts[-1] == REGISTRY) and path.is_file():
            return path
    return None


def read_module(path: Path) -> Module:
    return parse_module(read_text(path), str(path))


def package_of(source: str) -> str:
    """The folder that a file's relative imports start from."""
    return Path(source).resolve().parent.name
