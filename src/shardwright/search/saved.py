"""The file of a search: what it has priced and compiled, from which the same search goes on, and its answers."""

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
from shardwright.search.compiled import CompiledAnswer
from shardwright.search.searching import Memory
from shardwright.search.solving import Node
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of
from shardwright.search.space.settings import Setting

EVERY_S = 30.0
"""Seconds between two writes while a search goes on."""


class SearchFile:
    """A JSON file: ``search`` is a digest of what is searched, ``priced`` its nodes by try, ``compiled`` its compiled answers by what was
    compiled, ``result`` what the verb prints with --json."""

    def __init__(
        self, path: Path, digest: str, tries: Mapping[str, Memory], compiled: Mapping[str, CompiledAnswer]
    ) -> None:
        self.path, self.digest, self._tries = path, digest, dict(tries)
        self.compiled = dict(compiled)
        self._written_s = time.monotonic()

    @classmethod
    def of(cls, path: Path, searched: str) -> SearchFile:
        """The file at a path, with what an earlier search of the same has priced. ``searched``: says model, machine and options. Raises InputError
        for a file of anything else."""
        digest = sha256(searched.encode()).hexdigest()
        if not path.exists():
            file = cls(path, digest, {}, {})
            # What cannot be written is said before the search.
            file.write()
            return file
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tries, other = content["priced"], content["search"]
            memories = {
                name: {text: tuple(map(_node, rows)) for text, rows in nodes.items()} for name, nodes in tries.items()
            }
            compiled = {text: CompiledAnswer.of_json(answer) for text, answer in content.get("compiled", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise InputError(f"--out {path}: it exists, and is no file of a search. Give another name.") from None
        if other != digest:
            raise InputError(
                f"--out {path}: it is of a search with another model, machine, options or version. Give another name, or delete it."
            )
        return cls(path, digest, memories, compiled)

    def memory_of(self, name: str) -> Memory:
        """What one try of the search has priced, which grows."""
        return self._tries.setdefault(name, {})

    def save(self) -> None:
        """Writes what is priced, if the last write is some seconds ago."""
        if time.monotonic() - self._written_s >= EVERY_S:
            self.write()

    def write(self, result: Mapping[str, object] | None = None) -> None:
        """Raises InputError if it cannot be written."""
        priced = {
            name: {text: [_json(node) for node in nodes] for text, nodes in memory.items()}
            for name, memory in self._tries.items()
        }
        compiled = {text: answer.to_json() for text, answer in self.compiled.items()}
        content = {
            "search": self.digest,
            **({} if result is None else {"result": result}),
            **({"compiled": compiled} if compiled else {}),
            "priced": priced,
        }
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
