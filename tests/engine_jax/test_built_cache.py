"""The cache of compiled programs: which entries are kept, and what their names depend on."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from shardwright.engine_jax.compile import built_cache
from shardwright.engine_jax.compile.compiling import Built, Stats


def test_the_least_recently_used_entries_are_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_cache, "ENTRIES", 2)
    for age, name in enumerate(("b", "c", "a")):
        built_cache._write(tmp_path / f"{name}.json.gz", Built(name, Stats(*range(len(Stats._fields))), 1.0))
        os.utime(tmp_path / f"{name}.json.gz", (1000 + age, 1000 + age))
    built_cache._write(tmp_path / "d.json.gz", Built("d", Stats(*range(len(Stats._fields))), 1.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "d.json.gz"]


def test_the_order_in_which_a_folder_lists_its_files_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    before = built_cache.digest(lowered, "a target")
    for name in ("glob", "rglob"):
        listed = getattr(Path, name)
        monkeypatch.setattr(
            Path, name, lambda self, *how, listed=listed, **more: sorted(listed(self, *how, **more), reverse=True)
        )
    assert built_cache.digest(lowered, "a target") == before
    assert built_cache.digest(lowered, "another") != before
