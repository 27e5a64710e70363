"""A spec: for each dim of one tensor, its logical axis and the mesh axes that shard it, major first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.core.mesh.hashed import HashedOnce


@dataclass(frozen=True, slots=True)
class DimSpec:
    """One tensor dim: its logical axis, and the mesh axes that shard it, major first."""

    logical_axis: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join((self.logical_axis, *self.axes))


@dataclass(frozen=True, slots=True)
class Spec(HashedOnce):
    """The placement of a tensor; ``str`` writes it in the notation.

    A mesh axis shards at most one dim, and no logical axis occurs twice: both are asserted here, for every
    tensor of every plan. Users' texts go through ``notation.parse``, which reports the error instead.

    >>> spec = Spec.of(batch=["data", "fsdp"], length=["expert"], embed=[])
    >>> print(spec)
    batch/data/fsdp length/expert embed
    >>> spec.axes, spec.dim_of("expert"), spec.axes_of("embed")
    (('data', 'fsdp', 'expert'), 1, ())
    """

    dims: tuple[DimSpec, ...]
    logical_axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Every mesh axis that shards this tensor, dim after dim."""

    def __post_init__(self) -> None:
        # Both are read many thousand times in a plan.
        names = tuple([dim.logical_axis for dim in self.dims])
        assert len(set(names)) == len(names), f"a logical axis occurs twice in one tensor: {self}"
        axes = tuple([axis for dim in self.dims for axis in dim.axes])
        assert len(set(axes)) == len(axes), f"an axis shards at most one dim of any tensor: {self}"
        object.__setattr__(self, "logical_axes", names)
        object.__setattr__(self, "axes", axes)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.dims)

    @classmethod
    def of(cls, **axes: Iterable[str]) -> Spec:
        """A spec from logical axes and the mesh axes that shard each."""
        return cls(tuple(DimSpec(name, tuple(sharding)) for name, sharding in axes.items()))

    @classmethod
    def build(cls, logical_axes: Iterable[str], axes: Mapping[str, Iterable[str]]) -> Spec:
        """A spec for the named dims, each sharded by its ``axes``; a dim that ``axes`` does not name is unsharded."""
        return cls(tuple(DimSpec(name, tuple(axes.get(name, ()))) for name in logical_axes))

    def dim_of(self, axis: str) -> int | None:
        """Number of the dim that the mesh axis shards, or None."""
        return next((number for number, dim in enumerate(self.dims) if axis in dim.axes), None)

    def axes_of(self, logical_axis: str) -> tuple[str, ...]:
        """The mesh axes that shard the named dim; none if the tensor has no such dim."""
        return next((dim.axes for dim in self.dims if dim.logical_axis == logical_axis), ())

    def without(self, axes: Iterable[str]) -> Spec:
        """The same tensor without the given mesh axes, as after an all-gather over them."""
        removed = set(axes)
        return Spec(
            tuple(DimSpec(dim.logical_axis, tuple(a for a in dim.axes if a not in removed)) for dim in self.dims)
        )

    def renamed(self, names: Mapping[str, str]) -> Spec:
        """The same sharding under other logical axes, as when ``length`` becomes ``kv_length``."""
        return Spec(tuple(DimSpec(names.get(d.logical_axis, d.logical_axis), d.axes) for d in self.dims))

    def prefixed(self, logical_axis: str, axes: Iterable[str] = ()) -> Spec:
        """The spec of the same tensor stacked along a new leading dim."""
        return Spec((DimSpec(logical_axis, tuple(axes)), *self.dims))

    def __str__(self) -> str:
        return " ".join(str(dim) for dim in self.dims)
