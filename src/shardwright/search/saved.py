"""The file of a search: what it has priced, from which the same search goes on, and its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.files.replaced import replace_text
from shardwright.search.searching import Memory
from shardwright.search.solving import Node, Solver
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of
from shardwright.search.space.settings import Setting

EVERY_S = 30.0
"""Seconds between two writes while a search goes on."""


class SearchFile:
    """A JSON file: ``search`` is a digest of what is searched, ``priced`` its nodes, ``result`` what the verb prints with --json."""

    def __init__(self, path: Path, digest: str, memory: Memory | None = None) -> None:
        self.path, self.digest = path, digest
        self.memory: Memory = {} if memory is None else memory
        self._written_s = time.monotonic()

    @classmethod
    def of(cls, path: Path, solver: Solver, version: str) -> SearchFile:
        """The file at a path, with what an earlier search of the same has priced. Raises InputError for a file that is of anything else."""
        digest = sha256(f"{version} {solver!r}".encode()).hexdigest()
        if not path.exists():
            return cls(path, digest)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            priced = content["priced"]
            searched = content["search"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"--out {path}: it exists, and is no file of a search. Give another name.") from None
        if searched != digest:
            raise InputError(
                f"--out {path}: it is of a search with another model, machine, options or version. Give another name, or delete it."
            )
        return cls(path, digest, {text: tuple(map(_node, nodes)) for text, nodes in priced.items()})

    def save(self) -> None:
        """Writes what is priced, if the last write is some seconds ago."""
        if time.monotonic() - self._written_s >= EVERY_S:
            self.write()

    def write(self, result: Mapping[str, object] | None = None) -> None:
        priced = {text: [_json(node) for node in nodes] for text, nodes in self.memory.items()}
        content = {"search": self.digest, **({} if result is None else {"result": result}), "priced": priced}
        replace_text(self.path, json.dumps(content) + "\n")
        self._written_s = time.monotonic()


def _json(node: Node) -> list[object]:
    arrangement = node.arrangement
    return [
        arrangement.form,
        dict(arrangement.sizes),
        asdict(node.setting),
        node.level,
        node.seconds,
        node.bytes_per_device,
    ]


def _node(row: list[Any]) -> Node:
    form, sizes, setting, level, seconds, num_bytes = row
    layout = layout_of(form_named(form), tuple(sizes))
    return Node(
        arrangement=Arrangement(layout=layout, sizes=sizes, form=form),
        setting=Setting(**setting),
        level=level,
        seconds=seconds,
        bytes_per_device=num_bytes,
    )
