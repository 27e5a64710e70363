"""Writing a program: each call is one step, and refuses what cannot be meant.

>>> draft = Draft(sizes={"M": 64, "H": 4, "D": 16}, initializer_stddev=0.02)
>>> attention = draft.part("attention")
>>> x = attention.take(draft.field("input.x", "B L M"), "input")
>>> attention.product("B L M, M H D -> B L H D", x, "q", "queries").name
'attention.queries'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.program.dims import LETTERS, read_dims
from shardwright.core.program.part import Part
from shardwright.core.program.primitives import Loss, Primitive
from shardwright.core.program.program import LayerStack, Program, Step, Value, WeightUse


class Draft:
    """A program that is being written."""

    def __init__(self, *, sizes: Mapping[str, int], initializer_stddev: float) -> None:
        self.sizes, self.initializer_stddev = dict(sizes), initializer_stddev
        self._fields: list[Value] = []
        self._present: set[Value] = set()
        self._steps: list[Step] = []
        self._stacks: list[LayerStack] = []
        self._section, self._stack = "", None
        self._names: dict[tuple[str | None, str], Value] = {}
        self._weights: dict[tuple[str | None, str], WeightUse] = {}

    def section(self, name: str) -> None:
        """The rows of what follows are listed under this part of the model."""
        self._section = name

    def part(self, name: str, component: str = "") -> Part:
        """A part whose values and weights are called ``name.*``. ``component``: whose roles it has, if not ``name``'s."""
        component = component or name
        if component not in COMPONENTS:
            raise InputError(f"no component '{component}'. {did_you_mean(component, COMPONENTS)}")
        return Part(self, name, component)

    def field(self, name: str, dims: str, dtype: str | None = None) -> Value:
        """A field of the batch."""
        value = Value(name=name, component="input", dims=read_dims(dims), row=name, dtype=dtype)
        self._fields.append(value)
        self._present.add(value)
        return value

    def layers(self, name: str, num: int, layer: Callable[[Value], Value], stream: Value) -> Value:
        """``num`` layers, each of which makes a stream of the stream."""
        if any(stack.name == name for stack in self._stacks):
            raise InputError(f"two stacks are called '{name}'. Each has a name of its own.")
        outside, self._stack = set(self._present), name
        output = layer(stream)
        self._stack, self._present = None, outside | {output}
        if (output.name, output.dims) != (stream.name, stream.dims):
            raise InputError(f"a layer of '{name}' gets {stream} and returns {output}. The next layer needs {stream}.")
        first = sum(stack.num for stack in self._stacks)
        self._stacks.append(LayerStack(name=name, num=num, first_layer=first, input=stream, output=output))
        return output

    def finished(self) -> Program:
        """The program. Each value is of use."""
        used = {value for step in self._steps for value in step.inputs} | {stack.output for stack in self._stacks}
        for step in self._steps:
            unused = [value for value in step.outputs if value not in used and not isinstance(step.does, Loss)]
            if unused:
                raise InputError(
                    f"{unused[0]} is made by {type(step.does).__name__.lower()}, and nothing uses it. Use it, or leave it out."
                )
        return Program(
            sizes=self.sizes,
            fields=tuple(self._fields),
            steps=tuple(self._steps),
            stacks=tuple(self._stacks),
            initializer_stddev=self.initializer_stddev,
        )

    def size_of(self, dim: str, sizes: Mapping[str, int]) -> int:
        """Elements along a dim. ``sizes``: of a value or of a call, before those of the program."""
        size = sizes.get(dim, self.sizes.get(dim))
        if size is None:
            raise InputError(
                f"'{dim}' ({LETTERS[dim]}) has no size. Give it to the program, or to the operation: {dim}=..."
            )
        return size

    def record(self, does: Primitive, inputs: Sequence[Value], outputs: Sequence[Value], *weights: WeightUse) -> Value:
        """Adds a step; returns its first output."""
        absent = [value for value in inputs if value not in self._present]
        if absent:
            raise InputError(
                f"{absent[0]} is of another layer or of another program. A layer has its input, and what is made before the layers."
            )
        self._present.update(outputs)
        for output in outputs:
            key = (self._stack, output.name)
            if output.name and key in self._names:
                raise InputError(f"two values of a layer are called '{output.name}'. Each has a name of its own.")
            self._names[key] = output
        for weight in weights:
            key = (self._stack, weight.name)
            tied = self._stack is None and key in self._weights
            if key in self._weights and not tied:
                raise InputError(f"weight '{weight.name}' is used twice in a layer. Give each its own name.")
            if tied and (self._weights[key].shape, self._weights[key].logical_axes) != (
                weight.shape,
                weight.logical_axes,
            ):
                raise InputError(
                    f"weight '{weight.name}' is {self._weights[key].shape} and {weight.shape}. One weight has one shape."
                )
            self._weights[key] = weight
        self._steps.append(
            Step(
                does=does,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                weights=weights,
                section=self._section,
                stack=self._stack,
            )
        )
        return outputs[0]
