"""What each value, each cotangent and each weight's gradient is a sum over, from the dims of the operations.

| operation | its output is a sum over | the cotangent of its input is one over | the gradient of its weight is one over |
|---|---|---|---|
| product | what it contracts | what the output has from the weight | the dims that the weight does not have |
| embed | the vocabulary | - | the tokens |
| norm, bias | - | - | the dims that the weight does not have |
| attend | the keys, which no axis shards | of keys and values: the queries | - |
| join of one that is that of all heads | - | the heads | - |

Where devices shard a dim of a sum, each has a summand: the tensor is partial until something sums it. A sum stays through operations that
are linear; that of an output's cotangent is one of its input's cotangent, and of the weight's gradient. What sums is a ``Take``:

| take | sums, forward of the value and backward of its cotangent |
|---|---|
| of or to the rows of experts (dispatch, combine) | nothing: what a token's experts return is summed once, after it is combined |
| to another component | all |
| inside a component | what is a sum over dims of another component, and over the dim that it renames |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.core.findings.errors import InputError
from shardwright.core.model.table import Contraction
from shardwright.core.program.dims import contractions, sharded_together
from shardwright.core.program.primitives import (
    NOT_LINEAR,
    Add,
    Attend,
    Combine,
    Embed,
    Join,
    Loss,
    Product,
    Take,
)
from shardwright.core.program.program import Program, Step, Value

Sums = tuple[Contraction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSums:
    """``values``: of each value. ``cotangents``: of each value that has one. ``gradients``: of each use of a weight, by its step."""

    values: Mapping[Value, Sums]
    cotangents: Mapping[Value, Sums]
    gradients: Mapping[Step, Sums]

    def summed(self, take: Step) -> Sums:
        """What a take sums of its value."""
        (source,) = take.inputs
        return _summed(take, self.values[source])

    def fed(self, take: Step) -> Sums:
        """What a take sums of its result's cotangent."""
        return _summed(take, self.cotangents.get(take.output, ()))


def sums_of(program: Program) -> ProgramSums:
    """The sums of all values. Raises InputError for an operation on one summand that is wrong of a summand, for a value whose uses leave
    its cotangent complete and partial at once, and for a weight that the loss does not depend on."""
    values = _forward(program)
    cotangents, gradients = _backward(program, values)
    return ProgramSums(values=values, cotangents=cotangents, gradients=gradients)


def _forward(program: Program) -> dict[Value, Sums]:
    values: dict[Value, Sums] = dict.fromkeys(program.fields, ())
    for step in program.steps:
        inputs = [values[value] for value in step.inputs]
        if isinstance(step.does, NOT_LINEAR):
            _require_complete(step, values)
        sums = _joined(*inputs)
        match step.does:
            case Product(dims=dims):
                sums = _joined(*inputs, step.output.sums_over(dims.contracted))
            case Embed():
                sums = step.output.sums_over(("V",))
            case Take():
                summed = _summed(step, sums)
                sums = tuple(dim for dim in sums if dim not in summed)
            case Add():
                _require_same(step, values)
            case Combine() if inputs[1]:
                raise InputError(
                    f"{step.inputs[1]} is a sum over {_text(inputs[1])}, and so is not the weights yet. Take it first."
                )
            case _:
                if _is_bias(step) and sums:
                    raise InputError(
                        f"{step.inputs[0]} is a sum over {_text(sums)}, of which each device has a summand: a bias would be added by each. "
                        "Add it to the sum."
                    )
        for output in step.outputs:
            values[output] = sums
    return values


def _backward(program: Program, values: Mapping[Value, Sums]) -> tuple[dict[Value, Sums], dict[Step, Sums]]:
    uses: dict[Value, list[tuple[Step, Sums]]] = {}
    cotangents: dict[Value, Sums] = {}
    gradients: dict[Step, Sums] = {}
    for stack in program.stacks:
        # The stream between two layers, and what a layer gives to the next.
        cotangents[stack.output] = ()
    for step in reversed(program.steps):
        for output in step.outputs:
            if output in uses:
                cotangents[output] = _agreed(output, uses[output])
        outputs = [cotangents[output] for output in step.outputs if output in cotangents and output.is_float]
        if isinstance(step.does, Loss):
            uses.setdefault(step.inputs[0], []).append((step, ()))
            continue
        for weight in step.weights:
            if not outputs and not weight.frozen:
                raise InputError(
                    f"the loss does not depend on '{weight.name}': no gradient trains it. Use what it makes, or leave it out."
                )
        if not outputs:
            continue
        of_outputs = _joined(*outputs)
        if isinstance(step.does, Take):
            fed = _summed(step, of_outputs)
            of_outputs = tuple(dim for dim in of_outputs if dim not in fed)
        for number, value in enumerate(step.inputs):
            if value.is_float:
                uses.setdefault(value, []).append((step, _joined(_of_input(step, number, values), of_outputs)))
            elif isinstance(step.does, Combine):
                continue
        if step.weights and not all(weight.frozen for weight in step.weights):
            gradients[step] = _joined(_of_weight(step), *(values[value] for value in step.inputs), of_outputs)
    return cotangents, gradients


def _of_input(step: Step, number: int, values: Mapping[Value, Sums]) -> Sums:
    """What the operation itself makes a sum of its input's cotangent over."""
    value = step.inputs[number]
    match step.does:
        case Product(dims=dims):
            return value.sums_over(dims.added)
        case Attend():
            return value.sums_over(("T",) if number else ("S",))
        case Join():
            return value.sums_over(tuple(dim for dim in step.output.dims[:-1] if dim not in value.dims))
        case Combine() if number:
            return values[step.inputs[0]]
        case _:
            return ()


def _of_weight(step: Step) -> Sums:
    """What the operation itself makes a sum of its weight's gradient over: the dims of tokens and whatever else the weight lacks."""
    component, value = step.weights[0].component, step.inputs[0]
    match step.does:
        case Product(dims=dims):
            return contractions(component, dims.tokens)
        case Embed():
            return contractions(component, value.dims)
        case _:
            lacking = value.dims[:-1] if not _is_bias(step) else tuple(d for d in value.dims if d not in step.does.dims)  # type: ignore[union-attr]
            return contractions(component, lacking)


def _summed(take: Step, sums: Sums) -> Sums:
    """What a take sums, of that which its value is a sum over."""
    assert isinstance(take.does, Take)
    (source,), target = take.inputs, take.output
    if take.does.kind in ("dispatch", "combine"):
        return ()
    if source.component != target.component:
        return sums
    renamed = source.sums_over(
        tuple(dim for dim in (*source.dims, *target.dims) if (dim in source.dims) != (dim in target.dims))
    )
    return tuple(dim for dim in sums if dim[0] != source.component or dim in renamed)


def _agreed(value: Value, uses: list[tuple[Step, Sums]]) -> Sums:
    """The cotangent from all uses, of which each device adds its own: it is a sum over the same axes from each."""
    kinds = {frozenset(map(sharded_together, sums)): (step, sums) for step, sums in uses}
    if len(kinds) > 1:
        (first, one_sums), (second, other_sums) = list(kinds.values())[:2]
        raise InputError(
            f"the cotangent of {value} is a sum over {_text(one_sums)} from {_name(first)}, and over {_text(other_sums)} from "
            f"{_name(second)}: where devices shard it, one is added too often. Take the value once for each."
        )
    # Uses are found from the last to the first.
    return _joined(*(sums for _, sums in reversed(uses)))


def _require_complete(step: Step, values: Mapping[Value, Sums]) -> None:
    for value in step.inputs:
        if values[value]:
            raise InputError(
                f"{type(step.does).__name__.lower()} of {value}, which is a sum over {_text(values[value])}: where devices shard it, each has a "
                "summand. Take the sum into another part first."
            )


def _require_same(step: Step, values: Mapping[Value, Sums]) -> None:
    first, *others = step.inputs
    for other in others:
        if set(values[first]) != set(values[other]):
            raise InputError(
                f"{first} plus {other}: one is a sum over {_text(values[first])}, the other over {_text(values[other])}: where devices shard it, "
                "one is added too often."
            )


def _is_bias(step: Step) -> bool:
    return type(step.does).__name__ == "Bias"


def _joined(*sums: Iterable[Contraction]) -> Sums:
    return tuple(dict.fromkeys(dim for part in sums for dim in part))


def _text(sums: Sums) -> str:
    return " and ".join(axis for _, axis in sums) or "nothing"


def _name(step: Step) -> str:
    if step.weights:
        return f"'{step.weights[0].name}'"
    named = [value.name for value in step.outputs if value.name]
    return f"'{named[0]}'" if named else type(step.does).__name__.lower()
