"""Where each tensor of a step ends up under a configuration: the axes larger than 1 of each dim, and the lines behind them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import DimSpec
from shardwright.core.model.table import ModelTable
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.rules import Rule, Rules
from shardwright.interop.maxtext.resolution.flax_resolution import Refused, Resolution, resolve, resolve_nnx
from shardwright.interop.maxtext.resolution.tensors import Step, Tagged, tensors_of

Dialect = Literal["linen", "nnx", "flax-nnx"]
"""How weights read rules: as MaxText's Linen path does, as its NNX path does (the same way since MaxText #4205), or as Flax
NNX does by itself, and MaxText's path did until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor under the rules. ``cuts``: for each dim the axes larger than 1 that cut it, major first."""

    tensor: Tagged
    cuts: tuple[tuple[str, ...], ...]
    obeyed: tuple[Rule | None, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for cut in self.cuts for axis in cut)

    @property
    def words(self) -> tuple[str, ...]:
        """Each dim as the notation has it, under MaxText's names; ours for a dim that it does not name."""
        names = (name or f"_{dim}" for name, dim in zip(self.tensor.names, self.tensor.dims, strict=True))
        return tuple(str(DimSpec(name, cut)) for name, cut in zip(names, self.cuts, strict=True))

    @property
    def notation(self) -> str:
        return " ".join(self.words)

    def mark(self, dim: int) -> tuple[int, int]:
        """Where a dim stands in ``notation``."""
        start = sum(len(word) + 1 for word in self.words[:dim])
        return start, start + len(self.words[dim])

    def dim_of(self, axis: str) -> int | None:
        return next((number for number, cut in enumerate(self.cuts) if axis in cut), None)

    def of(self, dim: str) -> tuple[str, ...]:
        """The axes of the dim with our logical axis; none where there is no such dim."""
        return next((cut for name, cut in zip(self.tensor.dims, self.cuts, strict=True) if name == dim), ())

    def bytes_per_device(self, mesh: Mesh) -> float:
        """Of all its layers, as if every dim divided."""
        return self.tensor.bytes / mesh.size(dict.fromkeys(self.axes))


def place(tensor: Tagged, rules: Rules, mesh: Mesh, dialect: Dialect = "linen") -> Placed:
    """One tensor under a list of rules; axes of size 1 and axes that the mesh lacks are left out, once all is decided."""
    if tensor.alone is not None:
        return _alone(tensor, rules, mesh, tensor.alone)
    found = resolve(tensor.names, rules)
    axes = resolve_nnx(tensor.names, rules) if dialect == "flax-nnx" and tensor.kind == "weight" else found.axes
    return _placed(tensor, found, axes, mesh)


def _alone(tensor: Tagged, rules: Rules, mesh: Mesh, peeled: tuple[str, int]) -> Placed:
    """Each dim by itself, as if no other took its axes; then one axis is taken off one dim."""
    obeyed, axes = [], []
    for number, name in enumerate(tensor.names):
        found = resolve([name], rules)
        obeyed.append(found.obeyed[0])
        axes.append(tuple(a for a in found.axes[0] if (a, number) != peeled))
    return _placed(tensor, Resolution(names=tensor.names, obeyed=tuple(obeyed)), tuple(axes), mesh)


def _placed(tensor: Tagged, found: Resolution, axes: Iterable[tuple[str, ...]], mesh: Mesh) -> Placed:
    return Placed(
        tensor=tensor,
        cuts=tuple(larger(cut, mesh) for cut in axes),
        obeyed=found.obeyed,
        refused=found.refused,
    )


def larger(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """The axes that the mesh has with a size above 1."""
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration on a mesh, and where it puts the tensors of a model's step."""

    configuration: Configuration
    mesh: Mesh
    table: ModelTable
    step: Step
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
        """The first site of a name, where the model and the configuration have it."""
        return next((placed for placed in self.activations if placed.tensor.name == name), None)

    def under(self, rules: Rules) -> Imported:
        """The same step under another list of rules."""
        return placed_under(
            replace(self.configuration, rules=tuple(rules)), self.mesh, self.table, self.step, self.dialect
        )


def placed_under(
    configuration: Configuration, mesh: Mesh, table: ModelTable, step: Step, dialect: Dialect = "linen"
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
