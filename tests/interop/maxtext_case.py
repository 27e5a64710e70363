"""A MaxText file with one fault, its neighbour without it, and what an import finds in both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.interop.maxtext.importing import MaxTextImport, import_maxtext
from shardwright.interop.maxtext.resolution.placement import Imported
from shardwright.interop.maxtext.sources import MaxTextRequest
from tests.interop.rule_files import CLEAN, edited

FOLDER = Path(__file__).parents[1] / "golden" / "imports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files by name, of which the first is imported, and import options. ``neighbour_files`` replaces files and options.

    ``where``: part of the ``where`` of the finding under test, where a case has several of its code.
    """

    name: str
    files: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    neighbour_files: Mapping[str, str] = field(default_factory=dict)
    neighbour_options: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def code(self) -> str:
        return self.name.split("-")[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    def neighbour(self) -> Case:
        return replace(
            self, files={**self.files, **self.neighbour_files}, options={**self.options, **self.neighbour_options}
        )


def findings(case: Case, folder: Path) -> tuple[Finding, ...]:
    """All findings of a case. Its files are written into a folder, which is the current directory of the import."""
    try:
        return _import(case, folder).findings
    except FindingsError as error:
        return error.findings


def imported_in(case: Case, folder: Path) -> Imported | None:
    """The imported configuration of a case; None where its sizes give no mesh."""
    try:
        return _import(case, folder).imported
    except FindingsError:
        return None


def _import(case: Case, folder: Path) -> MaxTextImport:
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        options = {"model": "mixtral-test", **case.options}
        return import_maxtext(MaxTextRequest(file=next(iter(case.files)), **options))
    finally:
        os.chdir(before)


def meant(case: Case, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings under test; those of severity info only where the case has no other of its code."""
    own = tuple(f for f in found if f.code == case.code and case.where in f.where)
    return tuple(f for f in own if f.severity != "info") or own


def mine(*edits: tuple[str, str]) -> dict[str, str]:
    return {"rules.yml": edited(CLEAN, *edits)}


CLEAN_FILE = {"rules.yml": CLEAN}
