"""The check of one lock: plan again, compare, report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.cli.reviewing.locked_request import command_of, layout_of, options_of, request_of, request_of_lock
from shardwright.cli.reviewing.saved_plan import read_saved_lock
from shardwright.cli.typed.request import TypedRequest, planned
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position, located
from shardwright.core.layout.declaration import DeclaredChange, declared_changes
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.files import replace_text
from shardwright.locks.difference import Difference, difference
from shardwright.locks.lock import Lock, line_of, lock_of, moved
from shardwright.locks.review import moved_finding, skipped_finding

Compiler = Callable[[TypedRequest, Plan, str], Mapping[str, Any]]
"""From a plan and a target to the compiled program of a lock (``locks.lock.compiled_program``).

Raises InputError where this machine cannot compile it, and FindingsError where no machine can.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result for one lock. ``error``: why it could not be checked. ``found`` is None where there is no plan to compare.

    ``places``: for each finding, its place in a file of the user. ``written``: the lock was written again.
    """

    path: Path
    found: Difference | None = None
    declared: tuple[DeclaredChange, ...] = ()
    findings: tuple[Finding, ...] = ()
    places: tuple[Position, ...] = ()
    error: str | None = None
    written: bool = False

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return InputError.exit_code
        return 1 if any(finding.severity == "error" for finding in self.findings) else 0

    def to_json(self) -> dict[str, object]:
        if self.error is not None:
            return {"file": str(self.path), "exit_code": self.exit_code, "error": self.error}
        return {
            "file": str(self.path),
            "exit_code": self.exit_code,
            "written": self.written,
            "declared": [change.to_json() for change in self.declared],
            "difference": None if self.found is None else self.found.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def check(path: Path, *, update: bool = False, compiler: Compiler) -> Checked:
    """Plan the lock's request again, and compile its program again where it has one.

    With ``update`` a lock that is out of date is written again, unless the plan has an error.
    """
    try:
        text, lock = read_saved_lock(path)
        if lock.compiled is not None and lock.compiled["target"] != lock.request.chips:
            raise InputError(_another_target(path, lock))
        if lock.compiled is not None:
            from shardwright.cli.running.compile import prepare

            prepare(options_of(lock.request, path))
        try:
            typed = request_of_lock(lock, path)
            plan = planned(typed)
        except FindingsError as error:
            return _without_plan(path, lock, error.findings)
        return _compared(path, text, lock, typed, plan, update, compiler)
    except InputError as error:
        return Checked(path=path, error=str(error))


def _compared(
    path: Path, text: str, lock: Lock, typed: TypedRequest, plan: Plan, update: bool, compiler: Compiler
) -> Checked:
    request = request_of(typed, layout_of(lock.request, path), options_of(lock.request, path), lock.request.model, path)
    compiled, skipped = (None, ()) if lock.compiled is None else _compiled_again(path, lock, typed, plan, compiler)
    now = lock_of(request, typed.request.layout, plan, compiled)
    found = moved(lock, now)
    declared = declared_changes(lock.declared, typed.request.layout)
    if lock.request.is_preset:
        # A preset's file is part of the package: the user cannot change its lines.
        declared = tuple(replace(change, position=None) for change in declared)
    findings = [*plan.faults, *skipped]
    # A program that was not compiled again is kept, if the plan did not move.
    new = replace(now, compiled=lock.compiled).text() if skipped else now.text()
    written = update and new != text and not any(finding.severity == "error" for finding in findings)
    if written:
        if skipped and found.moved:
            raise InputError(_not_renewed(path, lock, skipped[-1].needed))
        replace_text(path, new)
    here = Position(source=str(path), line=line_of(text, [row.name for row in found.tensors]), column=1)
    if not found.moved and declared and not update:
        _require_consistent(path, lock, typed, now, declared)
    if (found.moved or found.requested) and not written:
        command = shlex.join(["shardwright", "check", "--update", str(path)])
        findings.append(moved_finding(found, declared, lock=str(path), update=command, position=here))
    return Checked(
        path=path,
        found=found,
        declared=declared,
        findings=tuple(findings),
        places=tuple(_place(finding, here, lock) for finding in findings),
        written=written,
    )


def _require_consistent(
    path: Path, lock: Lock, typed: TypedRequest, now: Lock, declared: Sequence[DeclaredChange]
) -> None:
    """Refuse a lock whose declaration does not place its tensors where it has them, when those did not move.

    A layout file may declare the same placements in another form; no file ever had the declaration of such a lock.
    Raises InputError.
    """
    try:
        layout = read_layout(located(lock.declared, str(path)), name=now.request.layout)
        request = replace(typed.request, layout=layout)
        own = lock_of(now.request, layout, make_plan(request))
        if not difference({**own.rows, "compiled": None}, {**now.rows, "compiled": None}).moved:
            return
        why = f"{declared[0].where} is {declared[0].before} there"
    except FindingsError as error:
        why = error.findings[0].found
    raise InputError(
        f"{path}: this lock disagrees with itself: its tensors are those of the layout as it is, and its 'declaration' would "
        f"place them otherwise: {why}. Something else has changed it. Write it anew: "
        f"{shlex.join(['shardwright', 'check', '--update', str(path)])}"
    )


def _compiled_again(
    path: Path, lock: Lock, typed: TypedRequest, plan: Plan, compiler: Compiler
) -> tuple[Mapping[str, Any] | None, tuple[Finding, ...]]:
    """The compiled program, or None and the findings that say why there is none."""
    assert lock.compiled is not None
    target = lock.compiled["target"]
    faults: Sequence[Finding] = ()
    if plan.errors:
        why = "a plan without errors"
    else:
        try:
            return compiler(typed, plan, target), ()
        except InputError as error:
            why = str(error)
        except FindingsError as error:
            faults, why = error.findings, "a program without errors"
    what = f"the collectives and the memory of the program compiled for {target}"
    return None, (*faults, skipped_finding(what, why, where=str(path)))


def _without_plan(path: Path, lock: Lock, faults: Sequence[Finding]) -> Checked:
    """The result where the layout's file is not a valid layout any more, or its mesh cannot be built."""
    here = Position(source=str(path), line=1, column=1)
    why = "a plan, and there is none, for the reason in the findings of this lock"
    findings = (*faults, skipped_finding("tensors, collectives and memory", why, where=str(path)))
    return Checked(path=path, findings=findings, places=tuple(_place(finding, here, lock) for finding in findings))


def _another_target(path: Path, lock: Lock) -> str:
    assert lock.compiled is not None
    chips = "no chips" if lock.request.chips is None else f"'{lock.request.chips}'"
    return (
        f"{path}: this lock disagrees with itself: its program was compiled for '{lock.compiled['target']}', and its 'request' "
        f"has {chips}. Something else has changed it. Write it anew: {command_of(lock.request, path)}"
        f"{'' if lock.request.chips is None else ' --compiled'}"
    )


def _not_renewed(path: Path, lock: Lock, why: str) -> str:
    assert lock.compiled is not None
    return (
        f"{path}: the plan moved, and so did the program for {lock.compiled['target']} with it, which cannot be compiled "
        f"here: {why}\nNothing was written. Update it where it can be compiled, or write a lock of the plan alone: "
        f"{command_of(lock.request, path)}"
    )


def _place(finding: Finding, here: Position, lock: Lock) -> Position:
    """The finding's place in the layout's file if it has one, else in the lock. A preset's file is not the user's."""
    return here if finding.position is None or lock.request.is_preset else finding.position
