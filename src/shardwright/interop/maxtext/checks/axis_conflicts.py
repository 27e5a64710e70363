"""SW102: an axis that the rules give to two dims of one tensor. The first rule gets it; the other dim loses all of its axes."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, others, product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.rules import Rule
from shardwright.interop.maxtext.resolution.flax_resolution import SkippedRule
from shardwright.interop.maxtext.resolution.placement import Imported, Placed, larger

DISPATCHED = ("moe.dispatched", "moe.hidden", "moe.output")
"""Tensors whose lost axis decides the communication; ``dispatch`` reports them."""


def axis_lost(imported: Imported) -> Iterator[Drafted]:
    """Each pair of rules that conflict over one axis larger than 1 in some tensor, once, with the largest such tensor."""
    groups: dict[tuple[str, int, int], list[tuple[Placed, SkippedRule]]] = {}
    for placed in imported.placed:
        for no in placed.skipped:
            for axis in larger(no.taken, imported.mesh):
                winner = placed.applied[no.taken[axis]]
                assert winner is not None
                if not left_free(placed, no, imported) and not _is_dispatched(placed, axis):
                    groups.setdefault((axis, id(winner), id(no.rule)), []).append((placed, no))
    for (axis, _, _), cases in groups.items():
        yield Draft(finding=_lost(imported, axis, cases))


def left_free(placed: Placed, no: SkippedRule, imported: Imported) -> tuple[str, ...]:
    """The axes larger than 1 of a skipped rule that shard no dim of the tensor in the result."""
    return tuple(axis for axis in larger(no.rule.axes, imported.mesh) if axis not in placed.axes)


def _is_dispatched(placed: Placed, axis: str) -> bool:
    return placed.tensor.name in DISPATCHED and axis in placed.axes_of("batch")


def _lost(imported: Imported, axis: str, cases: list[tuple[Placed, SkippedRule]]) -> Finding:
    placed, no = max(cases, key=lambda case: case[0].bytes_per_device(imported.mesh))
    winner, fallback = placed.applied[no.taken[axis]], placed.applied[no.dim]
    assert winner is not None
    names = list(dict.fromkeys(each.tensor.name for each, _ in cases))
    got = placed.dim_axes[no.dim]
    result = f"a later rule gives it {product(imported.mesh, got)}" if got else "it stays unsharded"
    now = placed.bytes_per_device(imported.mesh) / placed.tensor.num
    return Finding(
        code="SW102",
        severity="info" if fallback is not None else "warning",
        tensor=placed.tensor.name,
        where=f"axis '{axis}' for '{no.rule.name}' of {others(names, 'tensor')}",
        position=no.rule.position,
        notation=placed.notation,
        mark=placed.mark(no.dim),
        found=f"'{winner.name}' ({winner.line}) has '{axis}', so that the rule for '{no.rule.name}' "
        f"({no.rule.line}) is skipped: {result}",
        needed=f"one dim for {product(imported.mesh, [axis])}: '{winner.name}' or '{no.rule.name}'",
        cost=f"{bytes_text(now)} of {placed.tensor.name} on each device, whichever has it; the order of the two rules decides which",
    )


def axis_twice(imported: Imported) -> Iterator[Drafted]:
    """A rule that names an axis twice: Flax accepts it, and JAX ends with an error at the first tensor."""
    for line in imported.rules:
        twice = next((axis for axis in line.axes if line.axes.count(axis) > 1), None)
        if twice is not None:
            once = Rule(name=line.name, axes=tuple(dict.fromkeys(line.axes)), position=line.position)
            yield Draft(
                finding=Finding(
                    code="SW102",
                    severity="error",
                    where=f"rule for '{line.name}'",
                    position=line.position,
                    found=f"axis '{twice}' twice in {line}",
                    needed="each axis once",
                ),
                candidates=(
                    Candidate(
                        text=f"Write '{once}'.",
                        edit=lambda i, old=line, new=once: i.under([new if r is old else r for r in i.rules]),
                    ),
                ),
            )
