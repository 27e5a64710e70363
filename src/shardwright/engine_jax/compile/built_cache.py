"""A cache of compiled programs: a program that is in it takes only the time to lower it.

An entry is one compressed JSON file, named by a digest of the lowered program and of everything else that the result
depends on: the target, the versions, the compiler's options in the environment. An entry that cannot be read is compiled again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import jax

from shardwright.core.installed import installed_version
from shardwright.engine_jax.compile.compiling import Built, Stats

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
OPTIONS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
ENTRIES = 64
"""How many entries are kept at most; the least recently used are deleted first."""


def cached(
    lowered: jax.stages.Lowered,
    target: str,
    build: Callable[[], Built],
    folder: Path | None,
    options: Mapping[str, str] = MappingProxyType({}),
) -> Built:
    """The compiled program. ``folder`` None: nothing is read from a cache or stored. ``options``: of the compiler."""
    if folder is None:
        return build()
    entry = folder / f"{digest(lowered, target, options)}.json.gz"
    known = _read(entry)
    if known is not None:
        return known
    built = build()
    _write(entry, built)
    return built


def default_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """SHARDWRIGHT_CACHE, or the user's cache folder; None where SHARDWRIGHT_CACHE is set and empty."""
    configured = environment.get("SHARDWRIGHT_CACHE")
    if configured is not None:
        return Path(configured) / "compiled" if configured else None
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardwright" / "compiled"


def environment_options(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The compiler's options in the environment, by the names of the variables that are set."""
    return {name: environment[name] for name in OPTIONS if environment.get(name)}


def digest(lowered: jax.stages.Lowered, target: str, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """A digest of all that the compiled text depends on; of the engine's files too, since the text names their lines."""
    engine = sorted(Path(__file__).parents[1].rglob("*.py"))
    inputs = {
        "program": lowered.as_text(),
        "engine": [hashlib.sha256(file.read_bytes()).hexdigest() for file in engine],
        "target": target,
        "versions": {name: installed_version(name) for name in COMPILERS},
        "options": {**{name: os.environ.get(name, "") for name in OPTIONS}, **options},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _read(entry: Path) -> Built | None:
    try:
        with gzip.open(entry, "rt", encoding="utf-8") as file:
            text, stats, seconds = json.load(file)
        built = Built(text, Stats(*stats), seconds)
        os.utime(entry)
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return built


def _write(entry: Path, built: Built) -> None:
    """Write an entry. An error is ignored: without the entry, the program is compiled again."""
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(built, file)
        temporary.replace(entry)
        entries = sorted(entry.parent.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
        for old in entries[:-ENTRIES]:
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
