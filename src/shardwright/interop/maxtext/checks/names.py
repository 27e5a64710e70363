"""SW111: names and axes in rules that nothing has, and names of tensors that no rule has."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.layout.wording import count, either
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy
from shardwright.interop.maxtext.reading.rules import Rule, names_of
from shardwright.interop.maxtext.reading.vocabulary import AXES, LOGICAL_NAMES, UNUSED
from shardwright.interop.maxtext.resolution.placing import Imported


def names_unknown(imported: Imported) -> Iterator[Drafted]:
    """Rules for a name that no tensor of any model carries: Flax takes them, and they never fire."""
    for name in names_of(imported.rules):
        if name in LOGICAL_NAMES:
            continue
        near = nearest(name, LOGICAL_NAMES)
        line = next(line for line in imported.rules if line.name == name)
        finding = Finding(
            code="SW111",
            severity="error" if near else "warning",
            where=f"rule for '{name}'",
            position=line.position,
            found=f"no tensor carries the name '{name}', so that its rule never fires and is never missed",
            needed=f"'{near}', or another of MaxText's {len(LOGICAL_NAMES)} names"
            if near
            else "a name that tensors carry",
        )
        remedies = (_renamed(name, near),) if near else ()
        yield Draft(finding=finding, candidates=remedies)


def _renamed(name: str, near: str) -> Remedy:
    def edit(imported: Imported) -> Imported:
        return imported.under(
            [
                Rule(name=near, axes=line.axes, position=line.position) if line.name == name else line
                for line in imported.rules
            ]
        )

    return Candidate(text=f"Write '{near}'.", edit=edit)


def axes_absent(imported: Imported) -> Iterator[Drafted]:
    """Axes that rules name and the mesh lacks: they count as axes of size 1, and still take part in clashes."""
    mesh = imported.mesh
    lines: dict[str, list[Rule]] = {}
    for line in imported.rules:
        for axis in line.axes:
            if axis not in mesh.shape:
                lines.setdefault(axis, []).append(line)
    for axis, those in lines.items():
        near = nearest(axis, mesh.names)
        known = axis in AXES
        names = ", ".join(f"'{name}'" for name in names_of(those)[:3])
        more = f" and {len(names_of(those)) - 3} more" if len(names_of(those)) > 3 else ""
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="warning" if known else "error",
                where=f"axis '{axis}' in {'a rule' if len(those) == 1 else 'rules'} for {names}{more}",
                position=those[0].position,
                found=f"the mesh ({', '.join(mesh.names)}) has no axis '{axis}', which then counts as one of size 1"
                + ("" if known else "; no mesh of MaxText's can have it"),
                needed=f"an axis of the mesh, or '{axis}' among 'mesh_axes'" if known else "an axis of the mesh",
            ),
            candidates=(_without_axis(axis), *((_axis_renamed(axis, near),) if near else ()))[:: -1 if near else 1],
        )


def _without_axis(axis: str) -> Remedy:
    def edit(imported: Imported) -> Imported:
        return imported.under([_with_axes(r, tuple(a for a in r.axes if a != axis)) for r in imported.rules])

    return Candidate(text=f"Take '{axis}' out.", edit=edit)


def _axis_renamed(axis: str, near: str) -> Remedy:
    def edit(imported: Imported) -> Imported:
        return imported.under(
            [_with_axes(r, tuple(dict.fromkeys(near if a == axis else a for a in r.axes))) for r in imported.rules]
        )

    return Candidate(text=f"Write '{near}'.", edit=edit)


def _with_axes(line: Rule, axes: tuple[str, ...]) -> Rule:
    return Rule(name=line.name, axes=axes, position=line.position)


def names_without_a_rule(imported: Imported) -> Iterator[Drafted]:
    """Names that tensors of this model carry and the list has no line for: their dims stay whole, unsaid."""
    ruled = set(names_of(imported.rules))
    carried: dict[str, list[str]] = {}
    for placed in imported.placed:
        for name in placed.tensor.names:
            if name is not None and name not in ruled:
                carried.setdefault(name, []).append(placed.tensor.name)
    if carried:
        shown = "\n".join(f"{name}: {_some(tensors)}" for name, tensors in carried.items())
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="info",
                where=f"names of {imported.table.name} without a rule",
                position=imported.configuration.rules_from,
                found=f"{count(len(carried), 'name')} that its tensors carry, whose dims stay whole\n{shown}",
                needed="a line for each, if only '[name, []]', so that it is said",
            )
        )


def _some(tensors: list[str]) -> str:
    distinct = list(dict.fromkeys(tensors))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"


def rules_unused(imported: Imported) -> Iterator[Drafted]:
    """Rules whose name this model's training has nowhere, in one line; and rules that are always passed over."""
    carried = {name for placed in imported.placed for name in placed.tensor.names if name is not None}
    names = names_of(imported.rules)
    idle = [name for name in names if name in LOGICAL_NAMES and name not in carried]
    if idle:
        dead = [name for name in idle if name in UNUSED]
        told = f"; {', '.join(dead)}: no tensor of any model" if dead else ""
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="info",
                where=f"rules that {imported.table.name} does not use",
                position=imported.configuration.rules_from,
                found=f"{count(len(idle), 'name')} that no tensor of its training carries: {', '.join(idle)}{told}",
                needed="nothing: other models, decoding and evaluation may use them",
            )
        )
    obeyed = {id(line) for placed in imported.placed for line in placed.obeyed if line is not None}
    for name in names:
        lines = [line for line in imported.rules if line.name == name]
        refused = [no for placed in imported.placed for no in placed.refused if no.rule is lines[0]]
        if name in carried and refused and not any(id(line) in obeyed for line in lines):
            axes = list(dict.fromkeys(axis for no in refused for axis in no.taken))
            yield Draft(
                finding=Finding(
                    code="SW111",
                    severity="warning",
                    where=f"rule for '{name}'",
                    position=lines[0].position,
                    found=f"it never fires: wherever a tensor carries '{name}', an earlier line has taken "
                    f"{either(map(repr, axes))}",
                    needed="a tensor that obeys it",
                )
            )
