"""A program as data: values, weights, and the steps that make the one of the other, in the order of the computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.core.model.table import Initializer
from shardwright.core.program.dims import LETTERS, contractions
from shardwright.core.program.primitives import Primitive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Value:
    """What a step makes. It is itself alone: two values with the same fields are two.

    ``name``: ``component.tensor`` as in the table; empty: it has none, and is made with what is made of it. ``row``: the activation
    of the table whose dims and sharding it has; empty: none. ``component``: of its roles. ``sizes``: of letters whose size here
    is not the program's. ``dtype``: its own; None: the computation's. ``kept``: whether an engine has it as an array, so that a policy
    may keep it.
    """

    name: str
    component: str
    dims: tuple[str, ...]
    row: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    kept: bool = True

    @property
    def is_float(self) -> bool:
        """Whether it has a cotangent."""
        return self.dtype not in ("int32", "bool")

    @property
    def logical_axes(self) -> tuple[str, ...]:
        return tuple(LETTERS[dim] for dim in self.dims)

    def sums_over(self, dims: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """What a sum over some dims is on the devices of its component."""
        return contractions(self.component, dims)

    def __str__(self) -> str:
        return f"'{self.name}'" if self.name else f"a value of {self.component} ({' '.join(self.dims)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """A weight where a step uses it. ``name``: inside its layer. ``torch_dims``: as PyTorch stores them, outputs first, each with the
    logical axes that are merged."""

    name: str
    component: str
    logical_axes: tuple[str, ...]
    shape: tuple[int, ...]
    initializer: Initializer
    torch_dims: tuple[tuple[str, ...], ...] | None = None
    in_use_dtype: str | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One operation. ``section``: the part of the model under which its rows are listed. ``stack``: that whose layers have it; None: it is
    outside of layers."""

    does: Primitive
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[WeightUse, ...] = ()
    section: str = ""
    stack: str | None = None

    @property
    def output(self) -> Value:
        """Its only output."""
        (value,) = self.outputs
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """Consecutive layers that are alike. ``input``, ``output``: the values that a layer gets of the one before and gives to the next."""

    name: str
    num: int
    first_layer: int
    input: Value
    output: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model from the fields of its batch to its loss.

    ``sizes``: elements along each dim by its letter. ``fields``: the values that a batch gives. ``steps``: of a stack, those of one of
    its layers.
    """

    sizes: Mapping[str, int]
    fields: tuple[Value, ...]
    steps: tuple[Step, ...]
    stacks: tuple[LayerStack, ...]
    initializer_stddev: float

    def width_of(self, value: Value) -> int:
        """Elements along the last dim of a value."""
        return value.sizes.get(value.dims[-1]) or self.sizes[value.dims[-1]]

    def stack(self, name: str | None) -> LayerStack | None:
        return next((stack for stack in self.stacks if stack.name == name), None)

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.num for stack in self.stacks)

    @property
    def of_batch(self) -> frozenset[Value]:
        """The values that no weight has a part in: they are made once for all layers."""
        values = set(self.fields)
        for step in self.steps:
            if not step.weights and all(value in values for value in step.inputs):
                values.update(step.outputs)
        return frozenset(values)

    def in_sections(self) -> list[Step]:
        """The steps by section, in the order in which sections begin."""
        sections = list(dict.fromkeys(step.section for step in self.steps))
        return sorted(self.steps, key=lambda step: sections.index(step.section))
