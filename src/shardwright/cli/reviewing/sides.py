"""The sides that are compared: layouts under the same options, and plans and locks from files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.cli.reviewing.locked_request import options_of_lock
from shardwright.cli.reviewing.saved_plan import is_saved, read_saved
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import TypedRequest, planned, typed_request, with_choice
from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.resolution.mesh_sizes import Sizes, mesh_faults, mesh_text
from shardwright.layouts import load_layout
from shardwright.locks.lock import Lock
from shardwright.models import names as model_names


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """One side. ``rows``: its plan, in the form of ``Plan.to_json`` or of ``Lock.rows``. ``chosen``: the options that were chosen for its chips."""

    name: str
    rows: Mapping[str, Any]
    chosen: Mapping[str, str]


def compared_sides(names: Sequence[str], model: str | None, options: PlanOptions) -> list[ComparedSide]:
    """The sides by their names, in order.

    Raises InputError for one that is neither a layout nor a file of a plan, and FindingsError for a layout without a plan.
    """
    for name in names:
        if name in model_names():
            raise InputError(f"'{name}' is a model, and layouts are compared: --model {name} before or after them.")
    saved = {name: read_saved(name) for name in names if is_saved(name)}
    locks = {name: side.lock for name, side in saved.items() if side.lock is not None}
    of_lock = bool(locks) and len(saved) == 1 and options.mesh is None
    if locks and len(saved) == 1:
        model, options = _as_locked(*next(iter(locks.items())), model, options)
    known = {axis for name in names if name not in saved for axis in load_layout(_name_and_sizes(name)[0]).mesh}
    if len(saved) < len(set(names)) and not of_lock:
        _refuse_unknown(options, sorted(known))
    layouts = [name for name in dict.fromkeys(names) if name not in saved]
    # What is left open beside a lock is as it is there.
    typed = typed_sides(layouts, model, options, for_chips=not locks, of_lock=of_lock)
    rows = {name: saved[name].rows if name in saved else _rows(name, typed[name]) for name in dict.fromkeys(names)}
    return [
        ComparedSide(name=name, rows=rows[name], chosen=typed[name].for_chips if name in typed else {})
        for name in names
    ]


def _as_locked(side: str, lock: Lock, model: str | None, options: PlanOptions) -> tuple[str, PlanOptions]:
    """The model and the options of the lock at ``side``, except those that were given. Another model takes its own defaults."""
    if model not in (None, lock.request.model):
        return model, options
    untouched = PlanOptions()
    given = {
        name: value
        for name in PlanOptions.__dataclass_fields__
        if (value := getattr(options, name)) != getattr(untouched, name)
    }
    # The `move` of the other layout is its own: it is compared too.
    return lock.request.model, replace(options_of_lock(lock, Path(side)), **{"move": None, **given})


def typed_sides(
    sides: Sequence[str], model: str | None, options: PlanOptions, *, for_chips: bool = True, of_lock: bool = False
) -> dict[str, TypedRequest]:
    """The requests of layouts that are compared. ``for_chips``: what is left open is chosen for the chips; then all have the same rows, the
    fewest that the devices of each layout share. ``of_lock``: the mesh is a lock's, and a layout on which it has no devices keeps its own."""
    typed = {side: _typed(side, model, options, of_lock=of_lock) for side in sides}
    rows = 0
    while for_chips:
        chosen = {side: _with_rows(alone, options, rows) for side, alone in typed.items()}
        numbers = {chosen[side].request.batch for side in sides}
        if len(numbers) <= 1:
            return chosen
        rows = max(numbers)
    return typed


def _with_rows(typed: TypedRequest, options: PlanOptions, rows: int) -> TypedRequest:
    """The request with what is chosen for its chips, and at least so many rows where they are not typed."""
    request = typed.request
    if options.batch is None:
        typed = replace(typed, request=replace(request, batch=max(rows, request.batch)))
    return with_choice(typed, request.layout.name, options)


def _typed(side: str, model: str | None, options: PlanOptions, *, of_lock: bool) -> TypedRequest:
    if model is None:
        raise InputError(
            f"'{side}' is a layout, and a layout is planned for a model. Give one: --model deepseek3-test. "
            f"(A plan that was saved with --json is a file that ends in .json.)"
        )
    name, of_side = _name_and_sizes(side)
    sizes: Sizes = of_side
    if options.mesh is not None:
        axes = load_layout(name).mesh
        common: Sizes = {axis: size for axis, size in mesh_sizes(options.mesh).items() if axis in axes}
        sizes = {**common, **of_side}
    typed = typed_request(model, name, replace(options, mesh=mesh_text(sizes) if sizes else None))
    if of_lock and mesh_faults(typed.request):
        return typed_request(model, name, replace(options, mesh=mesh_text(of_side) if of_side else None))
    return typed


def _rows(side: str, typed: TypedRequest) -> Mapping[str, Any]:
    """A layout's plan in the form of its JSON."""
    name, _ = _name_and_sizes(side)
    try:
        return planned(typed).to_json()
    except FindingsError:
        own = f"Give axis sizes for it alone after its name, as in {name}:AXIS=SIZE,..."
        sys.stderr.write(f"shardwright: '{side}' has no plan, for the reason below. {own}\n\n")
        raise


def _name_and_sizes(side: str) -> tuple[str, Sizes]:
    """The layout's name and its axis sizes in ``NAME:AXIS=SIZE,...``."""
    name, colon, sizes = side.rpartition(":")
    if not colon or "=" not in sizes:
        return side, {}
    return name, mesh_sizes(sizes, f"'{side}'")


def _refuse_unknown(options: PlanOptions, known: list[str]) -> None:
    """--mesh may name axes that one layout lacks, but not an axis that all lack."""
    for axis in mesh_sizes(options.mesh) if options.mesh is not None else ():
        if axis not in known:
            raise InputError(f"--mesh: no layout here has a mesh axis '{axis}'. {did_you_mean(axis, known)}")
