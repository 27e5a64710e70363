"""SW112: results that hang on where a line stands, and axes that are dropped with one that was taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, every, others, product
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy, in_place
from shardwright.interop.maxtext.checks.two_dims import left_free
from shardwright.interop.maxtext.reading.rules import Rule, Rules, names_of
from shardwright.interop.maxtext.resolution.flax_resolution import Refused
from shardwright.interop.maxtext.resolution.placing import Imported, Placed, larger


def free_axes_dropped(imported: Imported) -> Iterator[Drafted]:
    """Lines passed over for one axis whose other axes then cut nothing of the tensor; the one may be of size 1."""
    groups: dict[int, list[tuple[Placed, Refused]]] = {}
    for placed in imported.placed:
        for no in placed.refused:
            if left_free(placed, no, imported):
                groups.setdefault(id(no.rule), []).append((placed, no))
    for cases in groups.values():
        placed, no = max(cases, key=lambda case: case[0].bytes_per_device(imported.mesh))
        free = left_free(placed, no, imported)
        names = list(dict.fromkeys(each.tensor.name for each, _ in cases))
        axis, dim = next(iter(no.taken.items()))
        winner = placed.obeyed[dim]
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
                found=f"the line {no.rule} does nothing, because '{winner.name}' ({winner.line}) has '{axis}'"
                f"{', an axis of size 1' if small else ''}: {every(repr(a) for a in free)}, which nothing else has, "
                f"{'are' if len(free) > 1 else 'is'} dropped with it",
                needed=f"{product(imported.mesh, free)} on a dim of {placed.tensor.name}",
                cost=f"each device holds {imported.mesh.size(free)} times as much of {others(names, 'tensor')}",
            ),
            candidates=(_narrower(no.rule, set(no.taken)),),
        )


def _narrower(line: Rule, taken: set[str]) -> Remedy:
    """A second line for the name, without what the first was passed over for."""
    narrow = Rule(name=line.name, axes=tuple(axis for axis in line.axes if axis not in taken), position=line.position)

    def edit(imported: Imported) -> Imported:
        return imported.under(
            in_place(imported.rules, line.name, *(r for r in imported.rules if r.name == line.name), narrow)
        )

    return Candidate(text=f"Add '{narrow}' below line {line.position.line}.", edit=edit)


def moved_when_restated(imported: Imported) -> Iterator[Drafted]:
    """Names that a later source states again: their lines went to the end of the list, where others come first."""
    for restated in imported.configuration.restated:
        kept = imported.under(restated.kept)
        moved = [(a, b) for a, b in zip(kept.placed, imported.placed, strict=True) if a.cuts != b.cuts]
        if not moved:
            continue
        same = [line.axes for line in restated.old] == [line.axes for line in restated.new]
        before, after = max(moved, key=lambda pair: pair[1].bytes_per_device(imported.mesh))
        dim = next(number for number, cut in enumerate(before.cuts) if cut != after.cuts[number])
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
                f"moves it to the end of the list, where it comes after others: {count(len(moved), 'tensor')} "
                f"{'changes' if len(moved) == 1 else 'change'}\n{after.tensor.name} would be {before.notation} in its old place",
                needed="a rule that means the same wherever it is stated",
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
    """How many tensors would be cut otherwise if the names stood in the opposite order, each with its lines as they are.

    Those are left out whose passed-over lines have another of their name below, written for that.
    """
    names = names_of(imported.rules)
    turned = [line for name in reversed(names) for line in imported.rules if line.name == name]
    other = imported.under(turned)
    moved = [(a, b) for a, b in zip(imported.placed, other.placed, strict=True) if a.cuts != b.cuts]
    moved = [(a, b) for a, b in moved if not _says_it_falls_back(a)]
    if not moved:
        return
    here, there = max(moved, key=lambda pair: pair[0].bytes_per_device(imported.mesh))
    dim = next(number for number, cut in enumerate(here.cuts) if cut != there.cuts[number])
    yield Draft(
        finding=Finding(
            code="SW112",
            severity="warning",
            tensor=here.tensor.name,
            where="the order of names in the list",
            position=imported.configuration.rules_from,
            notation=here.notation,
            mark=here.mark(dim),
            found=f"{len(moved)} of {count(len(imported.placed), 'tensor')} are cut as they are because of it: "
            f"{others([a.tensor.name for a, _ in moved], 'tensor')}\nwith the names in the opposite order "
            f"{here.tensor.name} would be {there.notation}",
            needed="rules that mean the same in any order",
        )
    )


def _says_it_falls_back(placed: Placed) -> bool:
    """Whether each line that was passed over is followed by another of its name, written for that."""
    return bool(placed.refused) and all(placed.obeyed[no.dim] is not None for no in placed.refused)


def unreachable(imported: Imported) -> Iterator[Drafted]:
    """Lines that an earlier line of the same name always comes before: whatever stops that one stops these too."""
    seen: dict[str, list[Rule]] = {}
    for line in imported.rules:
        before = next((old for old in seen.get(line.name, ()) if set(old.axes) <= set(line.axes)), None)
        seen.setdefault(line.name, []).append(line)
        if before is None:
            continue
        yield Draft(
            finding=Finding(
                code="SW112",
                severity="warning",
                where=f"a further line for '{line.name}'",
                position=line.position,
                found=f"{line} is never reached: {before} ({before.line}) stands earlier, and where one of its axes is "
                "taken this line's are too",
                needed="one line, or a second that can do without an axis of the first",
            ),
            candidates=(
                Candidate(
                    text=f"Take line {line.position.line} out.",
                    edit=lambda i, gone=line: i.under([r for r in i.rules if r is not gone]),
                ),
            ),
        )
