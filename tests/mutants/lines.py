"""Which lines each test runs, and how long it takes: recorded once per test file, and again when the code it ran has changed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutants.forks import ROOT, SOURCES

MOST_CALLS = 300
"""Traced calls of a function in one test: a line that none of them runs is hardly run by that test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """``lines``: those that a test runs, by file. ``seconds``: CPU time, which does not depend on other programs."""

    name: str
    seconds: float
    lines: Mapping[str, frozenset[int]]


class Recorder:
    """A plugin of pytest that records the lines of our sources that each test runs."""

    def __init__(self, sources: Path) -> None:
        self.prefix = f"{sources}/shardwright/"
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self.lines: dict[CodeType, set[int]] = {}
        self.missing: dict[CodeType, set[int]] = {}
        self.calls: dict[CodeType, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines, self.missing, self.calls = {}, {}, {}
        started = time.process_time()
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines: dict[str, set[int]] = {}
            for code, ran in self.lines.items():
                lines.setdefault(code.co_filename.removeprefix(self.prefix), set()).update(ran)
            self.found[item.nodeid] = {
                "seconds": round(time.process_time() - started, 3),
                "lines": {file: sorted(ran) for file, ran in lines.items()},
            }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that measures time may fail under tracing, and cannot detect a fault then."""
        if report.failed:
            self.failed.append(report.nodeid)

    @property
    def passed(self) -> dict[str, dict[str, Any]]:
        return {name: one for name, one in self.found.items() if name not in self.failed}

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix) or code.co_name == "<module>":
            return None
        if code not in self.lines:
            self.lines[code], self.missing[code], self.calls[code] = set(), {n for *_, n in code.co_lines() if n}, 0
        self.calls[code] += 1
        if not self.missing[code] or self.calls[code] > MOST_CALLS:
            return None
        return self._ran

    def _ran(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            code, line = frame.f_code, frame.f_lineno
            self.lines[code].add(line)
            self.missing[code].discard(line)
        return self._ran


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def read_map(folder: Path, file: str) -> list[Traced] | None:
    """The recorded lines of the tests of a file; None if there are none, or if code that they ran has changed since."""
    kept = folder / f"{file.replace('/', '+')}.json"
    if not kept.exists():
        return None
    value = json.loads(kept.read_text(encoding="utf-8"))
    if any(digest(ROOT / name) != found for name, found in value["digests"].items()):
        return None
    return [
        Traced(
            name=name, seconds=one["seconds"], lines={file: frozenset(lines) for file, lines in one["lines"].items()}
        )
        for name, one in value["tests"].items()
    ]


def write_map(folder: Path, file: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    ran = {name for one in found.values() for name in one["lines"]}
    paths = [ROOT / file, *(SOURCES / name for name in sorted(ran))]
    value = {"digests": {path.relative_to(ROOT).as_posix(): digest(path) for path in paths}, "tests": found}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{file.replace('/', '+')}.json"
    kept.with_suffix(".new").write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
    kept.with_suffix(".new").rename(kept)
