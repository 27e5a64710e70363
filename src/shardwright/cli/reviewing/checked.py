"""One lock, planned again, and what there is to say of it."""

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
"""From a plan and a target to the compiled part of a lock (``core.lock.compiled_part``).

Raises InputError where it cannot be compiled here, and FindingsError for a program that cannot be.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One lock. ``error``: why it could not be checked. ``found`` is None where there is no plan to compare it with.

    ``places``: for each finding, where to show it in a file of the user's. ``written``: the lock is a new one now.
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
    """Plan again what a lock asks, and compile again what was compiled.

    With ``update`` it is written anew where it is no longer what it would be, unless the plan has an error.
    """
    try:
        text, lock = read_saved_lock(path)
        if lock.compiled is not None and lock.compiled["target"] != lock.request.chips:
            raise InputError(_another_target(path, lock))
        try:
            question = request_of_lock(lock, path)
            plan = planned(question)
        except FindingsError as error:
            return _without_plan(path, lock, error.findings)
        return _compared(path, text, lock, question, plan, update, compiler)
    except InputError as error:
        return Checked(path=path, error=str(error))


def _compared(
    path: Path, text: str, lock: Lock, question: TypedRequest, plan: Plan, update: bool, compiler: Compiler
) -> Checked:
    request = request_of(question, layout_of(lock.request, path), options_of(lock.request), lock.request.model, path)
    compiled, skipped = (None, ()) if lock.compiled is None else _compiled_again(path, lock, question, plan, compiler)
    now = lock_of(request, question.request.layout, plan, compiled)
    found = moved(lock, now)
    declared = declared_changes(lock.declared, question.request.layout)
    if lock.request.is_preset:
        # A preset's file is ours: whoever reads this cannot change a line of it.
        declared = tuple(replace(change, position=None) for change in declared)
    findings = [*plan.faults, *skipped]
    # What was not compiled again stays as it was, beside a plan that did not move.
    new = replace(now, compiled=lock.compiled).text() if skipped else now.text()
    written = update and new != text and not any(finding.severity == "error" for finding in findings)
    if written:
        if skipped and found.moved:
            raise InputError(_not_renewed(path, lock, skipped[-1].needed))
        replace_text(path, new)
    here = Position(source=str(path), line=line_of(text, [row.name for row in found.tensors]), column=1)
    if not found.moved and declared and not update:
        _agrees_with_itself(path, lock, question, now, declared)
    if (found.moved or found.said) and not written:
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


def _agrees_with_itself(
    path: Path, lock: Lock, question: TypedRequest, now: Lock, declared: Sequence[DeclaredChange]
) -> None:
    """Refuse a lock whose declaration is not that of its tensors, which are where they were locked.

    A layout's file may say the same in other words; what the lock says was never in a file. Raises InputError.
    """
    try:
        layout = read_layout(located(lock.declared, str(path)), name=now.request.layout)
        request = replace(question.request, layout=layout)
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
    path: Path, lock: Lock, question: TypedRequest, plan: Plan, compiler: Compiler
) -> tuple[Mapping[str, Any] | None, tuple[Finding, ...]]:
    """The compiled part, or what is to be said where there is none."""
    assert lock.compiled is not None
    target = lock.compiled["target"]
    faults: Sequence[Finding] = ()
    if plan.errors:
        why = "a plan without errors"
    else:
        try:
            return compiler(question, plan, target), ()
        except InputError as error:
            why = str(error)
        except FindingsError as error:
            faults, why = error.findings, "a program without errors"
    what = f"the collectives and the memory of the program compiled for {target}"
    return None, (*faults, skipped_finding(what, why, where=str(path)))


def _without_plan(path: Path, lock: Lock, faults: Sequence[Finding]) -> Checked:
    """Where the layout's file is no layout any more, or its mesh does not work out."""
    here = Position(source=str(path), line=1, column=1)
    why = "a plan, and there is none, for the reason that stands beside this"
    findings = (*faults, skipped_finding("tensors, collectives and memory", why, where=str(path)))
    return Checked(path=path, findings=findings, places=tuple(_place(finding, here, lock) for finding in findings))


def _another_target(path: Path, lock: Lock) -> str:
    assert lock.compiled is not None
    asked = "no chips" if lock.request.chips is None else f"'{lock.request.chips}'"
    return (
        f"{path}: this lock disagrees with itself: its program was compiled for '{lock.compiled['target']}', and its 'request' "
        f"has {asked}. Something else has changed it. Write it anew: {command_of(lock.request, path)}"
        f"{'' if lock.request.chips is None else ' --compiled'}"
    )


def _not_renewed(path: Path, lock: Lock, why: str) -> str:
    assert lock.compiled is not None
    return (
        f"{path}: the plan moved, and what was compiled for {lock.compiled['target']} with it, which cannot be compiled "
        f"here: {why}\nNothing was written. Update it where it can be compiled, or write a lock of the plan alone: "
        f"{command_of(lock.request, path)}"
    )


def _place(finding: Finding, here: Position, lock: Lock) -> Position:
    """A place in the layout's file where the finding has one, else in the lock. A preset's file is not the user's."""
    return here if finding.position is None or lock.request.is_preset else finding.position
