"""The placement of each tensor of a step under a configuration: the axes larger than 1 of each dim, and the rules that gave them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import DimSpec
from shardwright.core.model.table import ModelTable
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.rules import Rule, Rules
from shardwright.interop.maxtext.resolution.flax_resolution import Resolution, SkippedRule, resolve, resolve_nnx
from shardwright.interop.maxtext.resolution.tensors import AnnotatedTensor, StepShape, tensors_of

Dialect = Literal["linen", "nnx", "flax-nnx"]
"""How rules of weights are resolved: as on MaxText's Linen path, as on its NNX path (the same since MaxText #4205), or as by Flax
NNX alone, which MaxText's NNX path used until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor under the rules. ``dim_axes``: for each dim the axes larger than 1 that shard it, major first."""

    tensor: AnnotatedTensor
    dim_axes: tuple[tuple[str, ...], ...]
    applied: tuple[Rule | None, ...]
    skipped: tuple[SkippedRule, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.dim_axes for axis in axes)

    @property
    def words(self) -> tuple[str, ...]:
        """Each dim in notation, under MaxText's names; under ours, with an underscore, for a dim that MaxText does not name."""
        names = (name or f"_{dim}" for name, dim in zip(self.tensor.names, self.tensor.dims, strict=True))
        return tuple(str(DimSpec(name, axes)) for name, axes in zip(names, self.dim_axes, strict=True))

    @property
    def notation(self) -> str:
        return " ".join(self.words)

    def mark(self, dim: int) -> tuple[int, int]:
        """The start and end of a dim in ``notation``."""
        start = sum(len(word) + 1 for word in self.words[:dim])
        return start, start + len(self.words[dim])

    def dim_of(self, axis: str) -> int | None:
        return next((number for number, axes in enumerate(self.dim_axes) if axis in axes), None)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The axes of the dim with our logical axis ``dim``; none where there is no such dim."""
        return next((axes for name, axes in zip(self.tensor.dims, self.dim_axes, strict=True) if name == dim), ())

    def bytes_per_device(self, mesh: Mesh) -> float:
        """Bytes of all its layers on one device, as if the axes divided every dim."""
        return self.tensor.bytes / mesh.size(dict.fromkeys(self.axes))


def place(tensor: AnnotatedTensor, rules: Rules, mesh: Mesh, dialect: Dialect = "linen") -> Placed:
    """One tensor under a list of rules. Axes of size 1 and axes that the mesh lacks are removed after the resolution."""
    if tensor.alone is not None:
        return _alone(tensor, rules, mesh, tensor.alone)
    found = resolve(tensor.names, rules)
    axes = resolve_nnx(tensor.names, rules) if dialect == "flax-nnx" and tensor.kind == "weight" else found.axes
    return _placed(tensor, found, axes, mesh)


def _alone(tensor: AnnotatedTensor, rules: Rules, mesh: Mesh, peeled: tuple[str, int]) -> Placed:
    """Each dim resolved alone, as if no other took its axes; then one axis is removed from one dim."""
    applied, axes = [], []
    for number, name in enumerate(tensor.names):
        found = resolve([name], rules)
        applied.append(found.applied[0])
        axes.append(tuple(a for a in found.axes[0] if (a, number) != peeled))
    return _placed(tensor, Resolution(names=tensor.names, applied=tuple(applied)), tuple(axes), mesh)


def _placed(tensor: AnnotatedTensor, found: Resolution, axes: Iterable[tuple[str, ...]], mesh: Mesh) -> Placed:
    return Placed(
        tensor=tensor,
        dim_axes=tuple(larger(each, mesh) for each in axes),
        applied=found.applied,
        skipped=found.skipped,
    )


def larger(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """The axes that the mesh has with a size above 1."""
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration on a mesh, and the placement of the tensors of a model's step."""

    configuration: Configuration
    mesh: Mesh
    table: ModelTable
    step: StepShape
    placed: tuple[Placed, ...]
    dialect: Dialect = "linen"

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.configuration.rules

    @property
    def weights(self) -> tuple[Placed, ...]:
        return tuple(placed for placed in self.placed if placed.tensor.kind == "weight")

    @property
    def activations(self) -> tuple[Placed, ...]:
        return tuple(placed for placed in self.placed if placed.tensor.kind == "activation")

    def activation(self, name: str) -> Placed | None:
        """The first activation of a name; None where the model or the configuration lacks it."""
        return next((placed for placed in self.activations if placed.tensor.name == name), None)

    def under(self, rules: Rules) -> Imported:
        """The same step under another list of rules."""
        return placed_under(
            replace(self.configuration, rules=tuple(rules)), self.mesh, self.table, self.step, self.dialect
        )


def placed_under(
    configuration: Configuration, mesh: Mesh, table: ModelTable, step: StepShape, dialect: Dialect = "linen"
) -> Imported:
    """Every tensor of a model's step under a configuration."""
    tensors = tensors_of(table, step)
    return Imported(
        configuration=configuration,
        mesh=mesh,
        table=table,
        step=step,
        placed=tuple(place(tensor, configuration.rules, mesh, dialect) for tensor in tensors),
        dialect=dialect,
    )
