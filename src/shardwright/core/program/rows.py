"""The rows of a table that follow from a program: activations, and moves between them; all rows together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.findings.errors import InputError
from shardwright.core.model.names import TensorNames
from shardwright.core.model.table import Activation, Move, Operation, Weight
from shardwright.core.program.dims import LETTERS
from shardwright.core.program.kept import Layer, rows_elsewhere
from shardwright.core.program.names import tensor_names
from shardwright.core.program.primitives import Add, Attend, Take
from shardwright.core.program.program import Program, Step, Value
from shardwright.core.program.sums import ProgramSums, sums_of
from shardwright.core.program.weights import weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a program, by section in the order in which sections begin."""

    weights: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    moves: tuple[Move, ...]
    operations: tuple[Operation, ...]
    names: TensorNames


def rows_of(program: Program, published: Mapping[str, str]) -> Rows:
    """The rows of a program. ``published``: the name of each weight in published checkpoints, by its name in a layer.

    Raises InputError for what ``sums_of``, ``weights_of`` and ``tensor_names`` refuse, and for a name that means two things in two layers.
    """
    sums, of_batch = sums_of(program), program.of_batch
    layers = {stack.name: Layer.of(stack, program.steps, of_batch) for stack in program.stacks}
    like = rows_elsewhere(program.steps)
    return Rows(
        weights=tuple(weights_of(program, sums, layers, published)),
        activations=tuple(_activations(program, like, of_batch)),
        moves=tuple(_moves(program, sums, layers, of_batch)),
        operations=tuple(_of_all_stacks(row for layer in layers.values() for row in layer.operations(like))),
        names=tensor_names(program),
    )


def _activations(program: Program, like: Mapping[str, str], of_batch: frozenset[Value]) -> Iterator[Activation]:
    carried = {stack.input.row for stack in program.stacks}
    rows = {value.row: _row(value, 1, ()) for value in program.fields}
    for step in _queries_last(program.in_sections()):
        stack = program.stack(step.stack)
        for value in step.outputs:
            if not value.name or value.row != value.name or value.name in like:
                continue
            if value.row in carried:
                rows.setdefault(value.row, _row(value, program.num_layers, ()))
                continue
            num = 1 if stack is None or value in of_batch else stack.num
            row = _row(value, num, () if stack is None else (stack.name,))
            rows[value.row] = _of_both(rows[value.row], row, of_batch=value in of_batch) if value.row in rows else row
    return iter(rows.values())


def _row(value: Value, num: int, stacks: tuple[str, ...]) -> Activation:
    return Activation(
        name=value.row,
        component=value.component,
        logical_axes=value.logical_axes,
        num=num,
        dtype=value.dtype,
        sizes={LETTERS[dim]: size for dim, size in value.sizes.items()} or None,
        stacks=stacks,
    )


def _of_both(before: Activation, row: Activation, *, of_batch: bool) -> Activation:
    """One row for layers of several stacks."""
    if replace(before, num=0, stacks=()) != replace(row, num=0, stacks=()):
        raise InputError(
            f"'{row.name}' has dims {before.logical_axes} in {before.stacks[0]} and {row.logical_axes} in {row.stacks[0]}, or another "
            "size or dtype. Give it two names."
        )
    return replace(before, num=before.num if of_batch else before.num + row.num, stacks=(*before.stacks, *row.stacks))


def _queries_last(steps: Sequence[Step]) -> list[Step]:
    """The steps in the order in which tables list their values: queries beside what attends with them."""
    attends = {step.stack: number for number, step in enumerate(steps) if isinstance(step.does, Attend)}
    queries = {value for step in steps if _takes_queries(step) for value in (*step.inputs, *step.outputs)}

    def position(number: int) -> int:
        step = steps[number]
        return max(number, attends.get(step.stack, 0)) if queries & {*step.outputs} else number

    return [steps[number] for number in sorted(range(len(steps)), key=lambda number: (position(number), number))]


def _takes_queries(step: Step) -> bool:
    return isinstance(step.does, Take) and step.does.kind == "queries"


def _moves(
    program: Program, sums: ProgramSums, layers: Mapping[str, Layer], of_batch: frozenset[Value]
) -> Iterator[Move]:
    rows: dict[tuple[str, str], Move] = {}
    takes, adds = ([step for step in program.steps if isinstance(step.does, kind)] for kind in (Take, Add))
    for step in _listed(program, of_batch):
        assert isinstance(step.does, Take)
        (source,), target = step.inputs, step.output
        in_layer = step.stack is not None and target not in of_batch
        move = Move(
            source=source.row,
            target=target.row,
            summed=sums.summed(step),
            feeds=sums.fed(step),
            renamed=step.does.renamed or None,
            kind=step.does.kind,
            ends_layer=in_layer and layers[str(step.stack)].ends(step),
            beside=_beside(takes, adds, step) if in_layer else "",
        )
        if rows.setdefault((move.source, move.target), move) != move:
            raise InputError(f"'{move.source}' is taken to '{move.target}' in two ways. Give one of them another name.")
    return iter(rows.values())


def _listed(program: Program, of_batch: frozenset[Value]) -> list[Step]:
    """The takes in the order in which tables list them: in a section those of the batch first, and a summand where it is made."""
    steps = _queries_last(program.in_sections())
    made_at = {output: number for number, step in enumerate(steps) for output in step.outputs}
    sections = [step.section for step in steps]

    def key(number: int) -> tuple[int, bool, int]:
        step = steps[number]
        at = number if step.output.name else made_at[step.inputs[0]]
        return sections.index(steps[at].section), step.output not in of_batch, at

    takes = [number for number, step in enumerate(steps) if isinstance(step.does, Take)]
    return [steps[number] for number in sorted(takes, key=key)]


def _beside(takes: Sequence[Step], sums: Sequence[Step], step: Step) -> str:
    """Another part of the layer: the one that takes the same value before, or whose result is added to the same sum after."""
    takes = [other for other in takes if other.stack == step.stack]
    for other in takes[: takes.index(step)]:
        if other.inputs == step.inputs:
            return other.output.row
    for added in sums:
        if step.output in added.inputs[:-1]:
            last = next(other for other in takes if other.output is added.inputs[-1])
            return last.inputs[0].row
    return ""


def _of_all_stacks(operations: Iterable[Operation]) -> Iterator[Operation]:
    rows: dict[str, Operation] = {}
    for row in operations:
        before = rows.get(row.output)
        if before is not None and replace(before, stacks=()) != replace(row, stacks=()):
            raise InputError(
                f"'{row.output}' is made in two ways, in {before.stacks[0]} and in {row.stacks[0]}. Give it two names."
            )
        rows[row.output] = row if before is None else replace(before, stacks=(*before.stacks, *row.stacks))
    return iter(rows.values())
