"""SW107 and SW108: dims that their axes do not divide. MaxText drops axes until the others divide, or fails late."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import UNIT_NAMES
from shardwright.core.layout.wording import count, others, product
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.resolution.placement import Imported, Placed


def dims_indivisible(imported: Imported) -> Iterator[Drafted]:
    """SW107: dims of weights, once for each name and size."""
    mesh = imported.mesh
    groups: dict[tuple[str, int, tuple[str, ...]], list[tuple[Placed, int]]] = {}
    for placed in imported.weights:
        for number, (size, axes) in enumerate(zip(placed.tensor.shape, placed.dim_axes, strict=True)):
            if size % mesh.size(axes):
                key = (str(placed.tensor.names[number]), size, axes)
                groups.setdefault(key, []).append((placed, number))
    for (name, size, axes), cases in groups.items():
        placed, number = cases[0]
        line = placed.applied[number]
        kept = kept_by_maxtext(size, axes, imported)
        unit = UNIT_NAMES.get(placed.tensor.dims[number], "element")
        left = f"over {product(mesh, kept)} only" if kept else "over no axis"
        yield Draft(
            finding=Finding(
                code="SW107",
                severity="error",
                tensor=placed.tensor.name,
                where=f"dim '{name}' of {others([p.tensor.name for p, _ in cases], 'weight')}",
                position=line.position if line else imported.configuration.rules_from,
                notation=placed.notation,
                mark=placed.mark(number),
                found=f"{count(size, unit)} over {product(mesh, axes)}: MaxText silently shards an NNX variable {left} "
                "and ends with an error for any other variable",
                needed=f"axes whose product divides {size}",
                cost=f"{mesh.size(axes) // mesh.size(kept)} times the bytes of {placed.tensor.name} that the rule gives",
            )
        )


def kept_by_maxtext(size: int, axes: tuple[str, ...], imported: Imported) -> tuple[str, ...]:
    """The axes that MaxText keeps on a dim: each whose product with the kept ones before it divides the size."""
    kept: list[str] = []
    for axis in axes:
        if size % imported.mesh.size((*kept, axis)) == 0:
            kept.append(axis)
    return tuple(kept)


def rows_indivisible(imported: Imported) -> Iterator[Drafted]:
    """SW108: rows and tokens of the stream. Without an axis ``expert`` MaxText silently replicates the rows of the experts' inputs."""
    stream = imported.activation("residual.stream")
    assert stream is not None
    mesh = imported.mesh
    for number, (dim, size, axes) in enumerate(
        zip(stream.tensor.dims, stream.tensor.shape, stream.dim_axes, strict=True)
    ):
        if dim not in ("batch", "length") or size % mesh.size(axes) == 0:
            continue
        line = stream.applied[number]
        alone = imported.table.top_k is not None and mesh.shape.get("expert", 1) == 1 and dim == "batch"
        silent = (
            "; with 'expert' of size 1 MaxText silently gives every device all rows of the experts' inputs"
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
                found=f"{count(size, UNIT_NAMES[dim])} over {product(mesh, axes)}{silent}",
                needed=f"a multiple of {mesh.size(axes)}",
                cost=f"each product of the experts is computed {mesh.size(axes)} times" if alone else "",
            )
        )
