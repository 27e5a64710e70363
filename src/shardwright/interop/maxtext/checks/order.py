"""SW112: results that depend on the order of rules, and axes that are dropped with one that was taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, every, others, product
from shardwright.interop.maxtext.checks.axis_conflicts import left_free
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy, in_place
from shardwright.interop.maxtext.reading.rules import Rule, Rules, names_of
from shardwright.interop.maxtext.resolution.flax_resolution import SkippedRule
from shardwright.interop.maxtext.resolution.placement import Imported, Placed, larger


def free_axes_dropped(imported: Imported) -> Iterator[Drafted]:
    """Rules skipped for one taken axis, perhaps of size 1, whose other axes then shard nothing of the tensor."""
    groups: dict[int, list[tuple[Placed, SkippedRule]]] = {}
    for placed in imported.placed:
        for no in placed.skipped:
            if left_free(placed, no, imported):
                groups.setdefault(id(no.rule), []).append((placed, no))
    for cases in groups.values():
        placed, no = max(cases, key=lambda case: case[0].bytes_per_device(imported.mesh))
        free = left_free(placed, no, imported)
        names = list(dict.fromkeys(each.tensor.name for each, _ in cases))
        axis, dim = next(iter(no.taken.items()))
        winner = placed.applied[dim]
        assert winner is not None
        small = not larger(no.taken, imported.mesh)
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                tensor=placed.tensor.name,
                where=f"'{no.rule.name}' of {others(names, 'tensor')}",
                position=no.rule.position,
                notation=placed.notation,
                mark=placed.mark(no.dim),
                found=f"the rule {no.rule} is skipped, because '{winner.name}' ({winner.line}) has '{axis}'"
                f"{', an axis of size 1' if small else ''}: {every(repr(a) for a in free)}, which no other dim has, "
                f"{'are' if len(free) > 1 else 'is'} dropped with it",
                needed=f"{product(imported.mesh, free)} on a dim of {placed.tensor.name}",
                cost=f"each device holds {imported.mesh.size(free)} times as much of {others(names, 'tensor')}",
            ),
            candidates=(_narrower(no.rule, set(no.taken)),),
        )


def _narrower(line: Rule, taken: set[str]) -> Remedy:
    """A second rule for the name, without the axes for which the first was skipped."""
    narrow = Rule(name=line.name, axes=tuple(axis for axis in line.axes if axis not in taken), position=line.position)

    def edit(imported: Imported) -> Imported:
        return imported.under(
            in_place(imported.rules, line.name, *(r for r in imported.rules if r.name == line.name), narrow)
        )

    return Candidate(text=f"Add '{narrow}' below line {line.position.line}.", edit=edit)


def moved_when_restated(imported: Imported) -> Iterator[Drafted]:
    """Names that a later source states again: their rules moved to the end of the list, after others."""
    for restated in imported.configuration.restated:
        kept = imported.under(restated.kept)
        moved = [(a, b) for a, b in zip(kept.placed, imported.placed, strict=True) if a.dim_axes != b.dim_axes]
        if not moved:
            continue
        same = [line.axes for line in restated.old] == [line.axes for line in restated.new]
        before, after = max(moved, key=lambda pair: pair[1].bytes_per_device(imported.mesh))
        dim = next(number for number, axes in enumerate(before.dim_axes) if axes != after.dim_axes[number])
        first = restated.new[0]
        old = restated.old[0].position
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="error",
                tensor=after.tensor.name,
                where=f"'{restated.name}', stated again",
                position=first.position,
                notation=after.notation,
                mark=after.mark(dim),
                found=f"{'the same rule as' if same else 'another rule than'} {old.source}:{old.line}; stating it again "
                f"moves it to the end of the list, after others: {count(len(moved), 'tensor')} "
                f"{'changes' if len(moved) == 1 else 'change'}\n{after.tensor.name} would be {before.notation} in its old position",
                needed="a rule that means the same in any position",
            ),
            candidates=(_taken_out(restated.name, restated.kept),) if same else (),
        )


def _taken_out(name: str, kept: Rules) -> Remedy:
    def edit(imported: Imported) -> Imported:
        left = tuple(each for each in imported.configuration.restated if each.name != name)
        after = imported.under(kept)
        return replace(after, configuration=replace(after.configuration, restated=left))

    return Candidate(text=f"Take the rule for '{name}' out, which the base has already.", edit=edit)


def order_decides(imported: Imported) -> Iterator[Drafted]:
    """The number of tensors that would be sharded differently with the names in reversed order, the rules of each name in place.

    Tensors are excluded where each skipped rule has a later rule of its name as a fallback.
    """
    names = names_of(imported.rules)
    reversed_rules = [line for name in reversed(names) for line in imported.rules if line.name == name]
    other = imported.under(reversed_rules)
    moved = [(a, b) for a, b in zip(imported.placed, other.placed, strict=True) if a.dim_axes != b.dim_axes]
    moved = [(a, b) for a, b in moved if not _has_fallbacks(a)]
    if not moved:
        return
    here, there = max(moved, key=lambda pair: pair[0].bytes_per_device(imported.mesh))
    dim = next(number for number, axes in enumerate(here.dim_axes) if axes != there.dim_axes[number])
    yield Draft(
        finding=Finding(
            code="SW112",
            severity="warning",
            tensor=here.tensor.name,
            where="the order of names in the list",
            position=imported.configuration.rules_from,
            notation=here.notation,
            mark=here.mark(dim),
            found=f"{len(moved)} of {count(len(imported.placed), 'tensor')} depend on it: "
            f"{others([a.tensor.name for a, _ in moved], 'tensor')}\nwith the names in reversed order "
            f"{here.tensor.name} would be {there.notation}",
            needed="rules that mean the same in any order",
        )
    )


def _has_fallbacks(placed: Placed) -> bool:
    """Whether each skipped rule has a fallback: a later rule of its name that applies."""
    return bool(placed.skipped) and all(placed.applied[no.dim] is not None for no in placed.skipped)


def unreachable(imported: Imported) -> Iterator[Drafted]:
    """Rules that an earlier rule of the same name always precedes: where that one is skipped, these are too."""
    earlier: dict[str, list[Rule]] = {}
    for line in imported.rules:
        before = next((old for old in earlier.get(line.name, ()) if set(old.axes) <= set(line.axes)), None)
        earlier.setdefault(line.name, []).append(line)
        if before is None:
            continue
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="warning",
                where=f"another rule for '{line.name}'",
                position=line.position,
                found=f"{line} never applies: {before} ({before.line}) is earlier, and where one of its axes is "
                "taken, so is one of this rule's",
                needed="one rule, or a second without some axis of the first",
            ),
            candidates=(
                Candidate(
                    text=f"Take line {line.position.line} out.",
                    edit=lambda i, gone=line: i.under([r for r in i.rules if r is not gone]),
                ),
            ),
        )
