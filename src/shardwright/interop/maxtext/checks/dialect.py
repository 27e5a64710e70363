"""SW113: weights that Flax's two dialects shard differently, for ``--dialect flax-nnx``, which MaxText does not use."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import every, others
from shardwright.core.mesh.spec import DimSpec
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.rules import names_of
from shardwright.interop.maxtext.resolution.flax_resolution import resolve_nnx
from shardwright.interop.maxtext.resolution.placement import Imported, Placed, larger, place


def dialects_differ(imported: Imported) -> Iterator[Drafted]:
    """Weights by what NNX does with them: an error for an unknown axis, an error for a duplicate axis, or another sharding."""
    if imported.dialect != "flax-nnx":
        return
    ruled = names_of(imported.rules)
    strange: dict[str, list[Placed]] = {}
    twice: list[tuple[Placed, str]] = []
    other: list[tuple[Placed, tuple[tuple[str, ...], ...]]] = []
    for each in imported.weights:
        linen = place(each.tensor, imported.rules, imported.mesh)
        names = [n for n in each.tensor.names if n is not None and n not in ruled and n not in imported.mesh.shape]
        for name in names:
            strange.setdefault(name, []).append(linen)
        by_nnx = resolve_nnx(each.tensor.names, imported.rules)
        named = [axis for axes in by_nnx for axis in axes]
        dim_axes = tuple(larger(axes, imported.mesh) for axes in by_nnx)
        double = next((axis for axis in named if named.count(axis) > 1 and axis in imported.mesh.shape), None)
        if double is not None:
            twice.append((linen, double))
        elif not names and dim_axes != linen.dim_axes:
            other.append((linen, dim_axes))
    if strange:
        tensors = [placed for group in strange.values() for placed in group]
        yield _draft(
            imported,
            max(tensors, key=lambda p: p.tensor.bytes),
            list(dict.fromkeys(p.tensor.name for p in tensors)),
            f"{every(map(repr, strange))} {'have' if len(strange) > 1 else 'has'} no rule: Linen leaves the dim unsharded; NNX "
            "takes the name as a mesh axis, and JAX ends with an error",
        )
    if twice:
        placed, axis = max(twice, key=lambda pair: pair[0].tensor.bytes)
        yield _draft(
            imported,
            placed,
            list(dict.fromkeys(p.tensor.name for p, _ in twice)),
            f"Linen gives '{axis}' to one dim; NNX does not check whether an axis is taken and gives it to two, and JAX ends "
            "with an error",
        )
    if other:
        placed, dim_axes = max(other, key=lambda pair: pair[0].tensor.bytes)
        names = (name or f"_{dim}" for name, dim in zip(placed.tensor.names, placed.tensor.dims, strict=True))
        nnx = " ".join(str(DimSpec(name, axes)) for name, axes in zip(names, dim_axes, strict=True))
        yield _draft(
            imported,
            placed,
            list(dict.fromkeys(p.tensor.name for p, _ in other)),
            f"Linen applies the first rule that it can, NNX the last of a name: {nnx}",
        )


def _draft(imported: Imported, placed: Placed, names: list[str], found: str) -> Drafted:
    return Draft(
        finding=Finding(
            code="SW113",
            severity="error",
            tensor=placed.tensor.name,
            where=f"the dialect of {others(names, 'weight')}",
            position=imported.configuration.rules_from,
            notation=placed.notation,
            mark=(0, len(placed.notation)),
            found=found,
            needed="rules that both dialects resolve the same: exactly one rule for each name, and no axis for two dims",
        )
    )
