"""A program as an engine walks it: what it makes once a step, then the operations of an end or of a layer, one after the other.

An operation is one step, or a group of steps that an engine may do in a way of its own, which the group's steps define:

| group | its steps | why together |
|---|---|---|
| attention | from the takes of keys to attention | in a ring each shard of the keys is taken, goes through the steps between, and is attended to |
| experts | from a token's rows to their sum | rows are sorted by expert, sent once, and multiplied with their own expert's matrices |
| loss | the product of the scores and the loss | the scores of some tokens at a time |

What an engine needs to know of a step besides is here too: which values it names, which products have one input, and which weights both
ends use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwright.core.findings.errors import InputError
from shardwright.core.program.primitives import (
    Attend,
    Cap,
    Combine,
    Dispatch,
    Gate,
    Loss,
    Product,
    Rotate,
    Scale,
    Take,
)
from shardwright.core.program.program import Program, Step, Value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionGroup:
    """``takes``: of what devices exchange, keys and values or what both are made of. ``between``: the steps from there to the keys and the
    values that ``attend`` reads."""

    takes: tuple[Step, ...]
    between: tuple[Step, ...]
    attend: Step

    @property
    def queries(self) -> Value:
        return self.attend.inputs[0]

    @property
    def keys(self) -> Value:
        return self.attend.inputs[1]

    @property
    def values(self) -> Value:
        return self.attend.inputs[2]

    @property
    def output(self) -> Value:
        return self.attend.output

    @property
    def scale(self) -> float:
        assert isinstance(self.attend.does, Attend)
        return self.attend.does.scale

    @property
    def shares_heads(self) -> bool:
        """Whether several query heads have one head of keys and values."""
        return self.keys.dims[2] == "K"

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.takes, *self.between, self.attend)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertGroup:
    """``sent``, ``returned``: the takes of rows to experts and back. ``gate``, ``up``, ``down``: each expert's products, with ``hidden``
    between."""

    dispatch: Step
    sent: Step
    gate: Step
    up: Step
    hidden: Step
    down: Step
    returned: Step
    combine: Step

    @property
    def tokens(self) -> Value:
        return self.dispatch.inputs[0]

    @property
    def experts(self) -> Value:
        """The experts of each token."""
        return self.dispatch.inputs[1]

    @property
    def weights(self) -> Value:
        """Of each token's experts in its sum."""
        return self.combine.inputs[1]

    @property
    def output(self) -> Value:
        return self.combine.output

    @property
    def num_experts(self) -> int:
        return self.gate.weights[0].shape[0]

    @property
    def products(self) -> tuple[Step, Step, Step]:
        return self.gate, self.up, self.down

    @property
    def steps(self) -> tuple[Step, ...]:
        inside = (self.gate, self.up, self.hidden, self.down)
        return (self.dispatch, self.sent, *inside, self.returned, self.combine)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossGroup:
    """``product``: of the scores of each token. ``between``: steps on each score."""

    product: Step
    between: tuple[Step, ...]
    loss: Step

    @property
    def input(self) -> Value:
        return self.product.inputs[0]

    @property
    def output(self) -> Value:
        return self.loss.output

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.product, *self.between, self.loss)


Group = AttentionGroup | ExpertGroup | LossGroup
Operation = Step | Group
GroupOfKind = TypeVar("GroupOfKind", AttentionGroup, ExpertGroup, LossGroup)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """``of_batch``: steps on the fields of the batch alone, which are done once a step for all layers. ``prepared``: steps of layers that
    read what these make: what an engine makes of it (angles, a mask) it makes once for each of them. ``before``, ``after``: the two ends.
    ``layers``: by stack, the operations of one layer. ``named``: the values of layers that a policy may keep; those of takes are not
    among them, because a take that moves nothing makes no array."""

    program: Program
    of_batch: tuple[Step, ...]
    prepared: tuple[Step, ...]
    before: tuple[Operation, ...]
    layers: Mapping[str, tuple[Operation, ...]]
    after: tuple[Operation, ...]
    named: frozenset[Value]
    _prepared_at: Mapping[Step, int]
    _weights_of_input: Mapping[Value, tuple[str, ...]]

    def prepared_at(self, step: Step) -> int | None:
        """The place in ``prepared`` of what a step of a layer reads; None: it reads nothing of the batch."""
        return self._prepared_at.get(step)

    def weights_of_input(self, step: Step) -> tuple[str, ...]:
        """The weights that a product's input is multiplied with, in their order. Where they are quantized they may share its scales."""
        return self._weights_of_input[step.inputs[0]]

    @property
    def fields(self) -> Mapping[str, Value]:
        """The fields of the batch, by their names in it."""
        return {field.name.rpartition(".")[2]: field for field in self.program.fields}

    @property
    def input(self) -> Value:
        """Of the first layer."""
        return self.program.stacks[0].input

    @property
    def output(self) -> Value:
        """Of the last layer."""
        return self.program.stacks[-1].output

    @property
    def tied(self) -> frozenset[str]:
        """The weights that both ends use."""
        return frozenset(weights_in(self.before)) & frozenset(weights_in(self.after))

    def groups(self, kind: type[GroupOfKind]) -> list[GroupOfKind]:
        """Those of a kind, in layers and at the ends."""
        everywhere = (self.before, *self.layers.values(), self.after)
        return [operation for operations in everywhere for operation in operations if isinstance(operation, kind)]


def walk_through(program: Program) -> Walk:
    """Raises InputError for a program with a group that no engine has a way for."""
    of_batch, outputs = program.of_batch, {stack.output for stack in program.stacks}
    read_in_layers = [
        step
        for step in program.steps
        if step.stack is not None and not _is_of_batch(step, of_batch) and _read(step, of_batch)
    ]
    prepared: dict[object, Step] = {}
    for step in read_in_layers:
        prepared.setdefault(_same_preparation(program, step), step)
    places = list(prepared)
    once = _made_for(program.steps, (value for step in read_in_layers for value in _read(step, of_batch)))
    rest = [step for step in program.steps if step not in once]
    in_layers = [number for number, step in enumerate(rest) if step.stack is not None]
    return Walk(
        program=program,
        of_batch=tuple(step for step in program.steps if step in once),
        prepared=tuple(prepared.values()),
        before=_operations(rest[: in_layers[0]]),
        layers={
            stack.name: _operations([step for step in rest if step.stack == stack.name]) for stack in program.stacks
        },
        after=_operations(rest[in_layers[-1] + 1 :]),
        named=frozenset(
            value
            for step in rest
            if step.stack is not None and not isinstance(step.does, Take)
            for value in step.outputs
            if value.name and value.kept and value not in outputs
        ),
        _prepared_at={step: places.index(_same_preparation(program, step)) for step in read_in_layers},
        _weights_of_input=_weights_by_input(program.steps),
    )


def weights_in(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The names of the weights of operations, each once."""
    steps = (step for operation in operations for step in steps_of(operation))
    return tuple(dict.fromkeys(weight.name for step in steps for weight in step.weights))


def steps_of(operation: Operation) -> tuple[Step, ...]:
    return (operation,) if isinstance(operation, Step) else operation.steps


def _is_of_batch(step: Step, of_batch: frozenset[Value]) -> bool:
    return all(output in of_batch for output in step.outputs)


def _read(step: Step, of_batch: frozenset[Value]) -> tuple[Value, ...]:
    return tuple(value for value in step.inputs if value in of_batch)


def _same_preparation(program: Program, step: Step) -> object:
    """Equal for steps for which an engine makes the same of the batch."""
    rows = tuple(value.row for value in _read(step, program.of_batch))
    match step.does:
        case Rotate(rope=rope):
            return Rotate, rows, rope, program.width_of(step.inputs[0])
        case Attend(window=window):
            return Attend, rows, window
        case does:
            return type(does), rows


def _made_for(steps: Sequence[Step], values: Iterable[Value]) -> set[Step]:
    """The steps that make some values."""
    made_by = {output: step for step in steps for output in step.outputs}
    needed, waiting = set[Step](), list(values)
    while waiting:
        step = made_by.get(waiting.pop())
        if step is not None and step not in needed:
            needed.add(step)
            waiting += step.inputs
    return needed


def _operations(steps: Sequence[Step]) -> tuple[Operation, ...]:
    """The steps in their order; a group is where its last step is."""
    groups = {group.steps[-1]: group for group in _groups(steps)}
    inside = {step for group in groups.values() for step in group.steps}
    _require_closed(steps, groups.values())
    return tuple(groups.get(step, step) for step in steps if step in groups or step not in inside)


def _groups(steps: Sequence[Step]) -> list[Group]:
    found: list[Group] = []
    for step in steps:
        match step.does:
            case Attend():
                found.append(_attention(steps, step))
            case Combine():
                found.append(_experts(steps, step))
            case Loss():
                found.append(_loss(steps, step))
            case _:
                pass
    return found


def _attention(steps: Sequence[Step], attend: Step) -> AttentionGroup:
    ancestors = _made_for(steps, attend.inputs[1:3])
    takes = tuple(
        step for step in steps if step in ancestors and isinstance(step.does, Take) and step.does.kind == "keys"
    )
    after, between = {take.output for take in takes}, list[Step]()
    for step in steps:
        if step in ancestors and any(value in after for value in step.inputs):
            between.append(step)
            after.update(step.outputs)
    missing = [value for value in attend.inputs[1:3] if value not in after]
    if missing:
        raise InputError(f"attention reads {missing[0]}, which is of a device's own tokens. Take it to S first.")
    return AttentionGroup(takes=takes, between=tuple(between), attend=attend)


def _experts(steps: Sequence[Step], combine: Step) -> ExpertGroup:
    """The steps from ``Dispatch`` on, of one chain."""
    made_by = {output: step for step in steps for output in step.outputs}
    chain = [combine]
    for kind in (Take, Product, Gate):
        chain.append(_maker(made_by, chain[-1].inputs[0], kind))
    returned, down, hidden = chain[1:]
    gate, up = (_maker(made_by, value, Product) for value in hidden.inputs)
    sent = _maker(made_by, gate.inputs[0], Take)
    dispatch = _maker(made_by, sent.inputs[0], Dispatch)
    if up.inputs != gate.inputs:
        raise InputError(
            f"{hidden.output} is gated by a product of {gate.inputs[0]} and one of {up.inputs[0]}. Both have the rows of an expert."
        )
    return ExpertGroup(
        dispatch=dispatch, sent=sent, gate=gate, up=up, hidden=hidden, down=down, returned=returned, combine=combine
    )


def _loss(steps: Sequence[Step], loss: Step) -> LossGroup:
    made_by = {output: step for step in steps for output in step.outputs}
    between, step = list[Step](), made_by.get(loss.inputs[0])
    while step is not None and isinstance(step.does, Cap | Scale):
        between.insert(0, step)
        step = made_by.get(step.inputs[0])
    if step is None or not isinstance(step.does, Product):
        raise InputError(f"the loss is of {loss.inputs[0]}, which no product makes. Give it scores of the vocabulary.")
    return LossGroup(product=step, between=tuple(between), loss=loss)


def _maker(made_by: Mapping[Value, Step], value: Value, kind: type) -> Step:
    step = made_by.get(value)
    if step is None or not isinstance(step.does, kind):
        does = "nothing here" if step is None else type(step.does).__name__.lower()
        raise InputError(
            f"{value} is made by {does}, and engines have experts of two products, a gate and a third product, between dispatch and "
            f"combine: {kind.__name__.lower()} is needed."
        )
    return step


def _require_closed(steps: Sequence[Step], groups: Iterable[Group]) -> None:
    """Refuses a value that is made inside of a group and read outside."""
    for group in groups:
        inside = {output: step for step in group.steps if step is not group.steps[-1] for output in step.outputs}
        for step in steps:
            read = [value for value in step.inputs if value in inside and step not in group.steps]
            if read:
                raise InputError(
                    f"{read[0]} is made for {group.output or 'the loss'} alone, of which devices may have a part, and "
                    f"{type(step.does).__name__.lower()} reads it. Make it a second time."
                )


def _weights_by_input(steps: Sequence[Step]) -> dict[Value, tuple[str, ...]]:
    found: dict[Value, tuple[str, ...]] = {}
    for step in steps:
        if isinstance(step.does, Product):
            value = step.inputs[0]
            found[value] = (*found.get(value, ()), *(weight.name for weight in step.weights))
    return found
