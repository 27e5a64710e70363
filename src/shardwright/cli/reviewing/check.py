"""`shardwright check`: locks compared with the present plans."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.reviewing.checked import Checked, check
from shardwright.cli.reviewing.lock import SUFFIX
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import TypedRequest
from shardwright.cli.typed.verbs import CheckVerb
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan


def run_check(verb: CheckVerb) -> int:
    """Check every lock and print the result of each. Returns the highest of their exit codes."""
    checked = [check(path, update=verb.update, compiler=_compiled) for path in lock_files(verb.files)]
    if verb.json:
        errors = [one.error for one in checked if one.error is not None]
        write_json(
            {
                "checked": [one.to_json() for one in checked],
                "findings": [finding.to_json() for one in checked for finding in one.findings],
                **({"error": {"exit_code": 2, "message": "\n".join(errors)}} if errors else {}),
            }
        )
    for one in checked:
        if one.error is not None:
            sys.stderr.write(f"shardwright: {one.error}\n")
        elif not verb.json:
            from shardwright.report.review.check_view import check_view

            view = check_view(str(one.path), one.found, one.declared, one.findings, written=one.written)
            write_view(view, sys.stdout)
    if annotated(verb.annotations, os.environ):
        # GitHub reads both streams, and with --json stdout is one object.
        stream = sys.stderr if verb.json else sys.stdout
        stream.writelines(f"{line}\n" for one in checked for line in _annotations(one))
    return max(one.exit_code for one in checked)


def lock_files(names: Sequence[Path]) -> list[Path]:
    """The lock files to check. A folder stands for all its files with the suffix of locks; no name, for this folder.

    Raises InputError for a folder that has none.
    """
    files: list[Path] = []
    for name in names or [Path()]:
        inside = sorted(name.glob(f"*{SUFFIX}")) if os.path.isdir(name) else [name]
        if not inside:
            raise InputError(
                f"{'this folder' if name == Path() else name} has no file that ends in {SUFFIX}. Name the lock to check, "
                f"or write one with: shardwright lock MODEL --layout NAME|FILE"
            )
        files += inside
    return list(dict.fromkeys(files))


def annotated(form: str | None, environment: Mapping[str, str]) -> bool:
    """Whether to write annotations, by the option's value; without one, whether GitHub Actions runs this command."""
    return environment.get("GITHUB_ACTIONS") == "true" if form is None else form == "github"


def _compiled(typed: TypedRequest, plan: Plan, target: str) -> Mapping[str, Any]:
    # Loaded only for a lock that has a compiled program.
    from shardwright.cli.reviewing.locked_program import compiled_now

    return compiled_now(typed, plan, target)


def _annotations(one: Checked) -> Iterator[str]:
    from shardwright.report.interop.annotations import annotation, error_annotation

    if one.error is not None:
        yield error_annotation(one.error, str(one.path), os.environ)
    for finding, place in zip(one.findings, one.places, strict=True):
        yield annotation(finding, place, os.environ)
