"""The names of a program's tensors by what its operations make of them (``core/model/names.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.core.findings.errors import InputError
from shardwright.core.model.names import STREAM, TensorNames
from shardwright.core.program.primitives import (
    Add,
    Attend,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Join,
    Loss,
    Norm,
    Primitive,
    Product,
    Rotate,
    Split,
    Take,
)
from shardwright.core.program.program import Program, Step, Value


def tensor_names(program: Program) -> TensorNames:
    """The names of a program. Raises InputError for layers whose stream has another name than policies call it by, and for operations of
    which the core knows one, that stand under several names."""
    for stack in program.stacks:
        if stack.input.name != STREAM:
            raise InputError(f"the layers of '{stack.name}' get {stack.input}. Call it '{STREAM}', as policies do.")
    steps = _Steps(program)
    return steps.of_experts(steps.of_attention(steps.of_layers()))


class _Steps:
    """The steps of a program by what they make and by what they need."""

    def __init__(self, program: Program) -> None:
        self.steps = program.steps
        self.made_by = {output: step for step in program.steps for output in step.outputs}

    def of_layers(self) -> TensorNames:
        """The names of the ends, and of what all layers have."""
        scores = self._one(Loss, lambda step: step.inputs[0].name)
        ends = {self._product_of(step.inputs[0]).inputs[0].name for step in self._steps(Loss)}
        return TensorNames(
            embedded=self._one(Embed, lambda step: step.output.name),
            logits_input=_only(ends),
            scores=scores,
            between=frozenset(
                step.output.name for step in self._steps(Add) if step.stack and step.output.name not in ("", STREAM)
            ),
            normed=frozenset(
                step.output.row for step in self._steps(Take) if step.stack and self._is_made_by(step.inputs[0], Norm)
            ),
            summands=frozenset(
                self._taken(value).row for step in self._steps(Add) if step.stack for value in step.inputs[1:]
            ),
            rotated=frozenset(self._rotated()),
            latents=frozenset(
                self._split(step.inputs[0]).name
                for step in self._steps(Norm)
                if step.stack and step.inputs[0].name not in (STREAM, *self._sums())
            )
            - {""},
            hidden=frozenset(step.output.name for step in self._steps(Gate)),
        )

    def of_attention(self, names: TensorNames) -> TensorNames:
        if not self._steps(Attend):
            return names
        query, key, value = (
            self._one(Attend, lambda step, number=number: step.inputs[number].name) for number in range(3)
        )
        attended = self._one(Attend, lambda step: step.output.name)
        keys = {step.output.row for step in self._takes("keys") if step.output.is_float}
        return replace(
            names,
            queries=self._one(Attend, lambda step: self._taken(step.inputs[0]).name),
            queries_attended=query,
            keys_attended=key,
            values_attended=value,
            attended=attended,
            query_positions=self._one(Attend, lambda step: step.inputs[3].name),
            key_positions=self._one(Attend, lambda step: step.inputs[5].name),
            made_from_taken=frozenset({key, value} - keys),
            of_a_ring=frozenset({attended, key, value} | keys),
        )

    def of_experts(self, names: TensorNames) -> TensorNames:
        if not self._steps(Dispatch):
            return names
        received = _only({step.output.row for step in self._takes("dispatch")})
        back = self._takes("combine")
        outputs = _only({step.inputs[0].name for step in back})
        making = [step for step in self._steps(Product) if step.output.name == outputs]
        reading = [step for step in self._steps(Product) if step.inputs[0].row == received]
        return replace(
            names,
            tokens=self._one(Dispatch, lambda step: step.inputs[0].name),
            token_experts=self._one(Dispatch, lambda step: step.inputs[1].name),
            token_weights=self._one(Combine, lambda step: step.inputs[1].name),
            dispatched=self._one(Dispatch, lambda step: step.output.name),
            received=received,
            expert_hidden=_only({step.inputs[0].name for step in making}),
            expert_outputs=outputs,
            returned=_only({step.output.row for step in back}),
            combined=self._one(Combine, lambda step: step.output.name),
            reading_weights=_weights(reading),
            output_weights=_weights(making),
        )

    def _steps(self, kind: type[Primitive]) -> list[Step]:
        return [step for step in self.steps if isinstance(step.does, kind)]

    def _takes(self, kind: str) -> list[Step]:
        return [step for step in self.steps if isinstance(step.does, Take) and step.does.kind == kind]

    def _one(self, kind: type[Primitive], name: Callable[[Step], str]) -> str:
        return _only({name(step) for step in self._steps(kind)})

    def _is_made_by(self, value: Value, kind: type[Primitive]) -> bool:
        return value in self.made_by and isinstance(self.made_by[value].does, kind)

    def _product_of(self, value: Value) -> Step:
        """The product behind a value, through what is done to each of its elements."""
        step = self.made_by[value]
        return step if isinstance(step.does, Product) else self._product_of(step.inputs[0])

    def _taken(self, value: Value) -> Value:
        """A value before it was taken here."""
        return self.made_by[value].inputs[0] if self._is_made_by(value, Take) else value

    def _split(self, value: Value) -> Value:
        """The value that a part was split from."""
        return self.made_by[value].inputs[0] if self._is_made_by(value, Split) else value

    def _sums(self) -> set[str]:
        return {step.output.name for step in self._steps(Add)}

    def _rotated(self) -> Iterator[str]:
        """What a rotary embedding makes, alone or as a part."""
        parts = {step.output for step in self._steps(Rotate)}
        joined = {step.output for step in self._steps(Join) if parts & {*step.inputs}}
        yield from (value.name for value in parts | joined if value.name)


def _weights(steps: list[Step]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(weight.name for step in steps for weight in step.weights))


def _only(names: set[str]) -> str:
    """The name of what the core knows one of; none where there is none."""
    if len(names) > 1:
        raise InputError(
            f"{' and '.join(map(repr, sorted(names)))} are the same operation of two layers. Give them one name."
        )
    return next(iter(names), "")
