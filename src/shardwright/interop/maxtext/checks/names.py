"""SW111: names and axes in rules that do not exist, and names of tensors without a rule."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.layout.wording import count, either
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy
from shardwright.interop.maxtext.reading.rules import Rule, names_of
from shardwright.interop.maxtext.reading.vocabulary import AXES, LOGICAL_NAMES, UNUSED
from shardwright.interop.maxtext.resolution.placement import Imported


def names_unknown(imported: Imported) -> Iterator[Drafted]:
    """Rules for a name that no tensor of any model has: Flax accepts them, and they never apply."""
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
            found=f"no tensor has the name '{name}': its rule never applies, and nothing reports it",
            needed=f"'{near}', or another of MaxText's {len(LOGICAL_NAMES)} names"
            if near
            else "a name that tensors have",
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
    """Axes in rules that the mesh lacks: they count as axes of size 1, and still conflict."""
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
    """Names of this model's tensors without a rule in the list: their dims silently stay unsharded."""
    ruled = set(names_of(imported.rules))
    used: dict[str, list[str]] = {}
    for placed in imported.placed:
        for name in placed.tensor.names:
            if name is not None and name not in ruled:
                used.setdefault(name, []).append(placed.tensor.name)
    if used:
        shown = "\n".join(f"{name}: {_some(tensors)}" for name, tensors in used.items())
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="info",
                where=f"names of {imported.table.name} without a rule",
                position=imported.configuration.rules_from,
                found=f"{count(len(used), 'name')} of its tensors, whose dims stay unsharded\n{shown}",
                needed="a rule for each, at least '[name, []]', so that it is explicit",
            )
        )


def _some(tensors: list[str]) -> str:
    distinct = list(dict.fromkeys(tensors))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"


def rules_unused(imported: Imported) -> Iterator[Drafted]:
    """Rules whose name is in no tensor of this model's training, in one finding; and rules that are always skipped."""
    used = {name for placed in imported.placed for name in placed.tensor.names if name is not None}
    names = names_of(imported.rules)
    idle = [name for name in names if name in LOGICAL_NAMES and name not in used]
    if idle:
        dead = [name for name in idle if name in UNUSED]
        never = f"; {', '.join(dead)}: no tensor of any model" if dead else ""
        yield Draft(
            finding=Finding(
                code="SW111",
                severity="info",
                where=f"rules that {imported.table.name} does not use",
                position=imported.configuration.rules_from,
                found=f"{count(len(idle), 'name')} that no tensor of its training has: {', '.join(idle)}{never}",
                needed="nothing: other models, decoding and evaluation may use them",
            )
        )
    applied = {id(line) for placed in imported.placed for line in placed.applied if line is not None}
    for name in names:
        lines = [line for line in imported.rules if line.name == name]
        skipped = [no for placed in imported.placed for no in placed.skipped if no.rule is lines[0]]
        if name in used and skipped and not any(id(line) in applied for line in lines):
            axes = list(dict.fromkeys(axis for no in skipped for axis in no.taken))
            yield Draft(
                finding=Finding(
                    code="SW111",
                    severity="warning",
                    where=f"rule for '{name}'",
                    position=lines[0].position,
                    found=f"it never applies: in each tensor with '{name}' an earlier rule has taken "
                    f"{either(map(repr, axes))}",
                    needed="a tensor to which it applies",
                )
            )
