"""`shardwright lock`: write a layout, a model and their plan to a file."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.cli.reviewing.locked_request import request_of
from shardwright.cli.reviewing.saved_plan import read_json_file
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json
from shardwright.cli.typed.request import TypedRequest, as_typed, options_text, planned, requested, typed_request
from shardwright.cli.typed.verbs import LockVerb
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.plan.plan import Plan
from shardwright.files import replace_text
from shardwright.locks.lock import Lock, is_lock, lock_of

SUFFIX = ".lock.json"
"""The suffix of a lock's name without --out. `check` looks for it in folders."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def run_lock(verb: LockVerb) -> int:
    """Write the lock. Raises FindingsError for a layout with a fault: only a valid plan is locked."""
    if verb.compiled:
        from shardwright.cli.running.compile import prepare

        prepare(verb.plan)
    verb = with_named_model(verb, has_findings=False)
    chosen = requested(verb.model, verb.layout, verb.plan)
    layout, options = as_typed(chosen, verb.layout, verb.plan)
    typed = typed_request(verb.model, layout, options)
    plan = planned(typed)
    if plan.faults:
        raise FindingsError(plan.faults)
    path = _path(verb.out, default_name(verb.model, typed.request.layout.name))
    before = _before(path)
    request = request_of(typed, layout, options, verb.model, path)
    compiled, notes = (None, _dropped(before)) if not verb.compiled else _compiled(typed, plan, str(verb.plan.chips))
    lock = lock_of(request, typed.request.layout, plan, compiled)
    text = lock.text()
    if text != before:
        replace_text(path, text)
    if verb.plan.json:
        write_json({"file": str(path), "written": text != before, "lock": lock.to_json()})
    else:
        sys.stdout.write(_summary(path, lock, before, text, notes, chosen.for_chips))
    return 0


def default_name(model: str, layout: str) -> str:
    """
    >>> default_name("deepseek3-test", "ep-as-cp"), default_name("llama3-8b", "my layout/2")
    ('deepseek3-test.ep-as-cp.lock.json', 'llama3-8b.my-layout-2.lock.json')
    """
    return f"{model}.{_NOT_IN_A_NAME.sub('-', layout)[:100]}{SUFFIX}"


def _compiled(typed: TypedRequest, plan: Plan, target: str) -> tuple[Mapping[str, Any], str]:
    """The compiled program and a summary of it. Findings about what the compiler did are counted, and do not refuse the lock."""
    from shardwright.cli.reviewing.locked_program import compiled_for, locked_part

    program = compiled_for(typed, plan, target)
    errors = sum(finding.severity == "error" for finding in program.findings)
    shown = f"; of its findings, which `shardwright compile` shows, {errors} are errors" if errors else ""
    part = locked_part(program, typed)
    return part, f"{len(part['collectives'])} collectives of the program for {target}{shown}"


def _dropped(before: str | None) -> str:
    """A note, where the existing lock has a compiled program and the new one will have none."""
    old = None if before is None else json.loads(before).get("compiled")
    target = old.get("target") if isinstance(old, dict) else None
    return "" if target is None else f"nothing: the program for {target} is no longer held; --compiled holds it"


def _path(out: Path | None, name: str) -> Path:
    if out is None:
        return Path(name)
    return out / name if os.path.isdir(out) else out


def _before(path: Path) -> str | None:
    """The text of the existing lock, of any format; None where there is none. No other file is overwritten."""
    if not os.path.exists(path):
        return None
    try:
        text, value = read_json_file(path)
    except InputError as error:
        raise InputError(f"{_not_overwritten(path)}{error}") from None
    if not is_lock(value):
        raise InputError(f"{_not_overwritten(path)}it is not a lock.")
    return text


def _not_overwritten(path: Path) -> str:
    return f"{path}: a file of this name exists and was not overwritten. Delete it, or give another name with --out. About it: "


def _summary(path: Path, lock: Lock, before: str | None, text: str, compiled: str, for_chips: Mapping[str, str]) -> str:
    rows = lock.to_json()
    num_tensors, num_collectives = len(rows["tensors"]), len(rows["collectives"])
    did = "written" if before is None else "written anew" if before != text else "is as it was"
    left_open = " ".join(f"--{name.replace('_', '-')}" for name in lock.request.by_default)
    lines = [
        f"{path}: {did}",
        f"  holds        {num_tensors} tensors and {num_collectives} collectives of {rows['model']} under {rows['layout']}",
        *(
            f"  warning      training here lacks {row['part']} ('{row['key']}': {row['value']})"
            for row in rows.get("training_only", ())
        ),
        *([f"  compiled     {compiled}"] if compiled else []),
        *(
            [f"  chosen       {options_text(for_chips)}, for {lock.request.chips}; held as if typed"]
            if for_chips
            else []
        ),
        *([f"  by default   {left_open}"] if left_open else []),
        f"  to check it  {shlex.join(['shardwright', 'check', str(path)])}",
    ]
    return "\n".join(lines) + "\n"
