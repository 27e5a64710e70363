"""SW107 and SW108: dims that their axes do not divide. MaxText drops axes until the rest divide, or ends late."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import UNIT_NAMES
from shardwright.core.layout.wording import count, others, product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.resolution.placing import Imported, Placed


def dims_indivisible(imported: Imported) -> Iterator[Drafted]:
    """Dims of weights, once for each name and size."""
    mesh = imported.mesh
    groups: dict[tuple[str, int, tuple[str, ...]], list[tuple[Placed, int]]] = {}
    for placed in imported.weights:
        for number, (size, cut) in enumerate(zip(placed.tensor.shape, placed.cuts, strict=True)):
            if size % mesh.size(cut):
                key = (str(placed.tensor.names[number]), size, cut)
                groups.setdefault(key, []).append((placed, number))
    for (name, size, cut), cases in groups.items():
        placed, number = cases[0]
        line = placed.obeyed[number]
        kept = kept_by_maxtext(size, cut, imported)
        unit = UNIT_NAMES.get(placed.tensor.dims[number], "element")
        left = f"over {product(mesh, kept)} alone" if kept else "over nothing"
        yield Draft(
            finding=Finding(
                code="SW107",
                severity="error",
                tensor=placed.tensor.name,
                where=f"dim '{name}' of {others([p.tensor.name for p, _ in cases], 'weight')}",
                position=line.position if line else imported.configuration.rules_from,
                notation=placed.notation,
                mark=placed.mark(number),
                found=f"{count(size, unit)} over {product(mesh, cut)}: MaxText cuts an NNX variable {left}, without a word, "
                "and ends with an error for any other",
                needed=f"axes whose product divides {size}",
                cost=f"{mesh.size(cut) // mesh.size(kept)} times the bytes of {placed.tensor.name} that the rule asks for",
            )
        )


def kept_by_maxtext(size: int, cut: tuple[str, ...], imported: Imported) -> tuple[str, ...]:
    """The axes that it keeps on a dim: each that still divides with those before it."""
    kept: list[str] = []
    for axis in cut:
        if size % imported.mesh.size((*kept, axis)) == 0:
            kept.append(axis)
    return tuple(kept)


def rows_indivisible(imported: Imported) -> Iterator[Drafted]:
    """Rows and tokens of the stream; rows of the experts' inputs are whole in silence where no axis holds experts."""
    stream = imported.activation("residual.stream")
    assert stream is not None
    mesh = imported.mesh
    for number, (dim, size, cut) in enumerate(zip(stream.tensor.dims, stream.tensor.shape, stream.cuts, strict=True)):
        if dim not in ("batch", "length") or size % mesh.size(cut) == 0:
            continue
        line = stream.obeyed[number]
        alone = imported.table.top_k is not None and mesh.shape.get("expert", 1) == 1 and dim == "batch"
        silent = (
            "; with 'expert' of size 1 MaxText gives every device all rows of the experts' inputs, without a word"
            if alone
            else ""
        )
        yield Draft(
            finding=Finding(
                code="SW108",
                severity="error",
                tensor=stream.tensor.name,
                where=f"'{stream.tensor.names[number]}' of {stream.tensor.name}",
                position=line.position if line else None,
                notation=stream.notation,
                mark=stream.mark(number),
                found=f"{count(size, UNIT_NAMES[dim])} over {product(mesh, cut)}{silent}",
                needed=f"a multiple of {mesh.size(cut)}",
                cost=f"each product of the experts is made {mesh.size(cut)} times over" if alone else "",
            )
        )
