"""What a layer makes that has a name, so that a policy may keep it, and what its backward pass reads.

A value without a name is made together with the named one that is made of it, of the nearest named ones before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.model.table import Operation
from shardwright.core.program.primitives import READS, Gate, Product, Take
from shardwright.core.program.program import LayerStack, Step, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The steps of one layer of a stack. ``made_by``: the step of each of its values. ``of_batch``: values that are made of the batch
    alone, once for all layers. ``read_later``: values of which something that the backward pass reads is made."""

    stack: LayerStack
    steps: tuple[Step, ...]
    made_by: Mapping[Value, Step]
    of_batch: frozenset[Value]
    read_later: frozenset[Value]

    @staticmethod
    def of(stack: LayerStack, steps: Sequence[Step], of_batch: frozenset[Value]) -> Layer:
        own = tuple(step for step in steps if step.stack == stack.name)
        later: set[Value] = set()
        for step in reversed(own):
            read = set(reads_of(step))
            for value in step.inputs:
                if value in read or any(output in read or output in later for output in step.outputs):
                    later.add(value)
        made_by = {output: step for step in own for output in step.outputs}
        return Layer(stack=stack, steps=own, made_by=made_by, of_batch=of_batch, read_later=frozenset(later))

    def ends(self, step: Step) -> bool:
        """Whether the backward pass reads nothing that is made of a step's results: they only leave the layer."""
        return not any(output in self.read_later for output in step.outputs)

    def operations(self, like: Mapping[str, str]) -> Iterator[Operation]:
        """The named values that a layer makes. ``like``: the rows of those that have none of their own."""
        for step in self.steps:
            for value in step.outputs:
                if not self._is_kept(value) or (isinstance(step.does, Take) and self.ends(step)):
                    continue
                inputs, reads, weights = self._made(value)
                yield Operation(
                    output=value.name,
                    inputs=tuple(inputs),
                    reads=tuple(reads) if value.is_float else (),
                    weights=tuple(weights),
                    like=like.get(value.name),
                    stacks=(self.stack.name,),
                )

    def _is_kept(self, value: Value) -> bool:
        return _stands_alone(value) and value is not self.stack.output and value not in self.of_batch

    def _named(self, value: Value) -> list[str]:
        """A value's name, or those of what it is made of."""
        return [value.name] if _stands_alone(value) else list(self._made(value)[0])

    def _made(self, value: Value) -> tuple[dict[str, None], dict[str, None], dict[str, None]]:
        """The named values of which a value is made, those that the backward pass to them reads, and the weights of its products."""
        inputs, reads, weights = dict[str, None](), dict[str, None](), dict[str, None]()
        step = self.made_by[value]
        for source in step.inputs:
            if source in self.of_batch:
                continue
            if _stands_alone(source):
                inputs[source.name] = None
            else:
                for names, more in zip((inputs, reads, weights), self._made(source), strict=True):
                    names.update(more)
        for source in reads_of(step):
            if source in self.of_batch:
                continue
            reads.update(dict.fromkeys(self._named(source) if source is not value else [value.name]))
        if isinstance(step.does, Product):
            weights.update(dict.fromkeys(weight.name for weight in step.weights))
        return inputs, reads, weights


def _stands_alone(value: Value) -> bool:
    """Whether an engine has a value as an array of its own."""
    return bool(value.name) and value.kept


def reads_of(step: Step) -> tuple[Value, ...]:
    """The values that the backward pass through a step reads."""
    read = READS.get(type(step.does))
    if read is None:
        return ()
    return (*step.inputs, *(step.outputs if read == "inputs and output" else ()))


def rows_elsewhere(steps: Sequence[Step]) -> dict[str, str]:
    """The row of each named value that has none of its own: what is gated lies as the result, a sum as its first summand."""
    gated = {value.name: step.output.row for step in steps if isinstance(step.does, Gate) for value in step.inputs}
    named = {
        value.name: value.row for step in steps for value in step.outputs if value.name and value.row != value.name
    }
    return {**named, **{name: row for name, row in gated.items() if name}}
