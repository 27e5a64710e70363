"""A folder that Orbax has saved: which leaves it holds, and where. No element is read, and neither Orbax nor a device is needed.

Orbax describes a tree in a JSON file (``_METADATA``). Its arrays are Zarr arrays, each in a folder of its name or all in one OCDBT
database, and its texts are in another JSON file. The name of an array is its path with dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint import CheckpointError
from shardwright.checkpoint.format.fields import Field, read_json
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import names_of
from shardwright.runs.own_program.conversion import number_at_end
from shardwright.runs.own_program.entries import StatePath

METADATA, STRINGS, ARRAYS, DATABASE = "_METADATA", "_strings.json", "array_metadatas", "manifest.ocdbt"
UNFINISHED = ".orbax-checkpoint-tmp"
SEQUENCE = 1
"""The type of a key that is a number of a list; any other is a key of a mapping."""
ARRAY_TYPES = ("jax.Array", "np.ndarray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf by its path. ``kind``: its type in Orbax. ``key``: the implementation of PRNG keys, of which it has the data."""

    path: StatePath
    kind: str
    key: str | None = None

    @property
    def name(self) -> str:
        """As ``engine_jax.save`` names it."""
        return "/".join(map(str, self.path)) or "leaf"

    @property
    def stored_name(self) -> str:
        """As Orbax names it."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxFolder:
    """One tree. ``fills``: whether an array that is not stored is zero, as in folders of older releases."""

    path: Path
    step: int | None
    leaves: Mapping[str, Leaf]
    is_database: bool
    is_zarr3: bool
    fills: bool
    custom: Any


def open_folder(path: Path, step: int | None) -> OrbaxFolder:
    """Find the tree in a folder and read what it holds.

    ``path``: of a tree, of a step with one tree, or of the steps of a CheckpointManager, of which ``step`` or the newest is taken.
    Raises InputError and CheckpointError: there is none or more than one, it is unfinished or damaged.
    """
    tree, number = _tree_in(path, step)
    source = tree / METADATA
    try:
        top = read_json(source)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}.") from error
    keys = _keys(tree)
    leaves: dict[str, Leaf] = {}
    entries = top["tree_metadata"]
    for entry in entries.mapping():
        item = entries[entry]
        path_of_leaf = tuple(_key(key) for key in item["key_metadata"].items())
        leaf = Leaf(path=path_of_leaf, kind=item["value_metadata"]["value_type"].text())
        leaf = Leaf(path=leaf.path, kind=leaf.kind, key=keys.get(leaf.stored_name))
        if leaf.name in leaves:
            raise item.error(f"two leaves are called '{leaf.name}'.")
        leaves[leaf.name] = leaf
    value = top.mapping()
    is_database = value.get("use_ocdbt")
    return OrbaxFolder(
        path=tree,
        step=number,
        leaves=leaves,
        is_database=(tree / DATABASE).exists() if is_database is None else is_database is True,
        is_zarr3=value.get("use_zarr3") is True,
        fills=value.get("store_array_data_equal_to_fill_value") is not True,
        custom=value.get("custom_metadata"),
    )


def _tree_in(path: Path, step: int | None) -> tuple[Path, int | None]:
    """The folder of the tree, and the step in its path."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder.")
    path = path.resolve()
    if UNFINISHED in path.name:
        raise CheckpointError(f"{path}: Orbax has not finished this save. Give another one.")
    if (path / METADATA).exists():
        return path, next((number for one in (path, path.parent) if (number := number_at_end(one)) is not None), None)
    trees = [one for one in _folders(path) if (one / METADATA).exists()]
    if len(trees) > 1:
        raise InputError(
            f"{path}: it has several trees: {names_of([one.name for one in trees])}. Give the folder of one."
        )
    if trees:
        return trees[0], number_at_end(path)
    steps = {number: one for one in _folders(path) if (number := number_at_end(one)) is not None and _has_tree(one)}
    if step is not None and steps and step not in steps:
        raise InputError(f"{path}: it has no step {step}. It has {', '.join(map(str, sorted(steps)[-8:]))}.")
    if not steps:
        old = (path / "checkpoint").exists() or (path / "msgpack").exists()
        raise CheckpointError(
            f"{path}: there is no tree of Orbax in it: no {METADATA}. "
            + (
                "An older release has saved it, or another program: restore it with Orbax and save it again."
                if old
                else "Give the folder of a save, of a step, or of a CheckpointManager."
            )
        )
    number = max(steps) if step is None else step
    return _tree_in(steps[number], None)[0], number


def _has_tree(path: Path) -> bool:
    return any((one / METADATA).exists() for one in (path, *_folders(path)))


def _folders(path: Path) -> Iterator[Path]:
    for one in sorted(path.iterdir()):
        if one.is_dir() and UNFINISHED not in one.name:
            yield one


def _key(item: Field) -> str | int:
    name = item["key"]
    if item["key_type"].integer() != SEQUENCE:
        return name.text()
    if re.fullmatch("[0-9]{1,9}", name.text()) is None:
        raise name.error(f"found '{name.text()}', needed the number of an entry of a list.")
    return int(name.text())


def _keys(tree: Path) -> Mapping[str, str]:
    """The implementation of the PRNG keys in each array that has keys, by the name that Orbax gives it."""
    found: dict[str, str] = {}
    for file in sorted((tree / ARRAYS).glob("process_*")):
        try:
            top = read_json(file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
        for item in top["array_metadatas"].items():
            array = item["array_metadata"]
            extra = array.mapping().get("ext_metadata")
            implementation = extra.get("random_key_impl") if isinstance(extra, dict) else None
            if isinstance(implementation, str):
                found[array["param_name"].text()] = implementation
    return found
