"""The entries of a checkpoint as those of a nested state: the path of each tensor and value, for a folder of another program.

| the checkpoint is of | paths |
|---|---|
| a pytree | the parts of a name: ``weights/up`` is (weights, up) |
| a module | (model, ``0.weight``); (optim, state, ``0.weight``, exp_avg); (optim, param_groups, 0, lr); values at the top |
| a state dict | as they were in it, where an import has kept them |
| a run of ours | one part: its name |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.checkpoint import Checkpoint
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.core.findings.errors import InputError
from shardwright.runs.own_program.store import JAX, STATE_DICT, TORCH, VALUES
from shardwright.runs.own_program.values import Reference, as_python, decoded

StatePath = tuple[str | int, ...]
"""Where an entry of a nested state is: keys of mappings and numbers of lists, from the outside in."""

PATHS, EMPTY_NODES = "paths", "empty"
"""The path of each entry of a state dict or a tree that its name does not give; and the nodes of a tree without leaves, each with
its path and its type in Orbax. Keys of a checkpoint's metadata, and of a tree of its values."""
EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": None}
"""Nodes without leaves, by their types in Orbax: what it restores of each."""
TIED = "tied"
"""The key of a module's values with the first name of each tied tensor, by its other names."""
MODULE, OPTIMIZER = "model", "optim"
"""The keys of a module and its optimizer, as in PyTorch's tutorials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """``tensors``: the path of each by its name. ``values``: each by its path; a ``Scalar`` is one element and its dtype.

    ``again``: other paths of tied tensors, each with the tensor's name. ``keys``: the implementation of each tensor that has the
    data of PRNG keys. ``empty``: nodes without leaves, by their paths.
    """

    tensors: Mapping[str, StatePath]
    values: Mapping[StatePath, Any]
    again: Mapping[StatePath, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[StatePath, Any] = field(default_factory=dict)


def entries_of(checkpoint: Checkpoint) -> Entries:
    metadata = checkpoint.point.metadata
    values = as_python(decoded(metadata[VALUES])) if type(metadata.get(VALUES)) is dict else {}
    program = metadata.get(PROGRAM)
    if program == TORCH:
        return _of_module(checkpoint, values)
    if program == STATE_DICT:
        known: Mapping[str, Any] = metadata.get(PATHS, {})
        place: dict[str, StatePath] = {name: tuple(known.get(name, (name,))) for name in (*checkpoint.tensors, *values)}
        return Entries(
            tensors={name: place[name] for name in checkpoint.tensors},
            values={place[name]: value for name, value in values.items()},
        )
    if program == JAX:
        leaves, known = values.get("leaves", {}), values.get(PATHS, {})
        of_leaf: dict[str, StatePath] = {
            name: tuple(known.get(name, name.split("/"))) for name in (*checkpoint.tensors, *leaves)
        }
        return Entries(
            tensors={name: of_leaf[name] for name in checkpoint.tensors},
            values={of_leaf[name]: value for name, value in leaves.items()},
            keys=values.get("keys", {}),
            empty={tuple(path): EMPTY[kind] for path, kind in values.get(EMPTY_NODES, ())},
        )
    return Entries(tensors={name: (name,) for name in checkpoint.tensors}, values={})


def _of_module(checkpoint: Checkpoint, values: Mapping[str, Any]) -> Entries:
    entries: dict[StatePath, Any] = {(MODULE, name): value for name, value in values.get("module", {}).items()}
    paths: dict[str, StatePath] = {}
    optimizer = values.get("optimizer")
    if optimizer is not None:
        for weight, kept in optimizer["state"].items():
            for key, value in kept.items():
                path: StatePath = (OPTIMIZER, "state", weight, key)
                if isinstance(value, Reference):
                    paths[value.tensor] = path
                else:
                    entries[path] = value
        for number, group in enumerate(optimizer["groups"].values()):
            for key, value in {"params": list(group["names"]), **group["options"]}.items():
                entries[OPTIMIZER, "param_groups", number, key] = value
    for name in checkpoint.tensors:
        paths.setdefault(name, _in_module(name))
    entries |= dict(flattened(values.get("own", {}), ()))
    tied = {_in_module(other): first for other, first in values.get(TIED, {}).items() if first in checkpoint.tensors}
    return Entries(tensors=paths, values=entries, again=tied)


def _in_module(name: str) -> StatePath:
    return tuple(name.split("/", 1)) if name.startswith("average/") else (MODULE, name)


def flattened(value: Any, path: StatePath) -> list[tuple[StatePath, Any]]:
    """The entries of a value, of its mappings, and of its lists that have a mapping somewhere inside: what DCP's flattening makes.

    >>> flattened({"a": [1, 2], "b": [{"c": 3}]}, ())
    [(('a',), [1, 2]), (('b', 0, 'c'), 3)]
    """
    if isinstance(value, Mapping):
        return [one for key, each in value.items() for one in flattened(each, (*path, str(key)))]
    if isinstance(value, list) and _has_mapping(value):
        return [one for number, each in enumerate(value) for one in flattened(each, (*path, number))]
    return [(path, value)]


def nested(entries: Mapping[StatePath, Any]) -> dict[Any, Any]:
    """Entries by their paths as mappings and lists in each other: the inverse. A list has all its numbers; else it is a mapping.
    Raises InputError for a path that begins with another one.

    >>> nested({("a",): [1, 2], ("b", 0, "c"): 3, ("d", 1): 4})
    {'a': [1, 2], 'b': [{'c': 3}], 'd': {1: 4}}
    """
    top = _Made()
    inner: list[tuple[_Made, Any]] = []
    for path, value in entries.items():
        place = top
        for number, key in enumerate(path[:-1]):
            if key not in place:
                place[key] = _Made()
                inner.append((place, key))
            elif not isinstance(place[key], _Made):
                raise InputError(f"{list(path[: number + 1])} is an entry, and {list(path)} is one inside it.")
            place = place[key]
        if path[-1] in place:
            raise InputError(f"{list(path)} is an entry, and there is another one inside it.")
        place[path[-1]] = value
    # From the inside out.
    for place, key in reversed(inner):
        made = place[key]
        place[key] = list(made.values()) if list(made) == list(range(len(made))) else dict(made)
    return dict(top)


class _Made(dict[Any, Any]):
    """A mapping that has been made of paths, and is no value."""


def _has_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(_has_mapping(each) for each in value))
