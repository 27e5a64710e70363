"""The layers of a model that keep the same, and what is made again in their backward pass.

The backward pass through each operation of a layer reads some activations. Those that are not kept are made again, by the operation
that makes them, from its inputs; and these in the same way, back to what is kept:

| kept | made again of a dense layer |
|---|---|
| its input (``full``) | all but the layer's last product, whose result nothing reads |
| and products with weights (``dots``) | norms, hidden units, attention, and what is resharded before a product |
| and all that is read (``none``) | nothing |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.patterns import names_of
from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.model.table import ModelTable, Operation, Weight, name_in_layer
from shardwright.core.policies.policy import BASES, CHANGES, INPUT, WEIGHTS, Part, read_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(HashedOnce):
    """Consecutive layers of a stack that keep the same. ``layers``: their numbers in the stack of the table, from 0.

    ``made``: all that a layer makes. ``named``: what the policy keeps, read or not, without the layer's input. ``saved``: what is on the device between the two passes;
    ``hosted``: on the host. ``again``: what is made again. ``gathers_again``: the weights are gathered again too.
    """

    stack: str
    layers: range
    made: frozenset[str]
    named: frozenset[str]
    saved: frozenset[str]
    hosted: frozenset[str]
    again: frozenset[str]
    gathers_again: bool

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.stack, self.layers, self.made, self.saved, self.again)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is made again and all is on the device."""
        return self.keeps_all_it_makes and not self.gathers_again

    @property
    def keeps_all_it_makes(self) -> bool:
        """Whether no activation is made again or on the host."""
        return not (self.again or self.hosted)

    @property
    def keeps_nothing(self) -> bool:
        """Whether its input is all that is there between the two passes."""
        return self.saved == {INPUT} and not self.hosted


def keep_a_mask(runs: Iterable[Run]) -> bool:
    """Whether there is a layer that keeps all it makes, and so the attention mask, which all layers have in common then."""
    return any(run.keeps_all_it_makes for run in runs)


@lru_cache(maxsize=1024)
def runs_of(
    table: ModelTable,
    remat: str,
    same: tuple[tuple[str, str], ...] = (),
    always: frozenset[str] = frozenset(),
) -> tuple[Run, ...]:
    """The runs of all stacks of a table, in their order.

    ``same``: activations that are one array with an earlier one, as queries that are not resharded. ``always``: those that their engine
    makes again in any layer that makes anything again.
    """
    experts = frozenset(weight.name for weight in table.weights if "experts" in weight.logical_axes)
    operations = table.operations or tuple(_of_users(table))
    return _runs(operations, tuple(stacks_of(table)), experts, remat, same, always)


@lru_cache(maxsize=256)
def _runs(
    operations: tuple[Operation, ...],
    stacks: tuple[tuple[str, int, int], ...],
    experts: frozenset[str],
    remat: str,
    same: tuple[tuple[str, str], ...],
    always: frozenset[str],
) -> tuple[Run, ...]:
    # All plans that a finding tries have the same operations.
    policy, found, names = read_policy(remat), [], dict(same)
    for stack, first, num in stacks:
        renamed = [_renamed(one, names) for one in operations if not one.stacks or stack in one.stacks]
        # What only gives an array another name makes nothing.
        own = [one for one in renamed if one.output not in one.inputs]
        batched = frozenset(name_in_layer(name, stack) for name in experts)
        parts = [policy.of_layer(first + number, stack) for number in range(num)]
        start = 0
        for number in range(1, num + 1):
            if number == num or parts[number] != parts[start]:
                found.append(_run(stack, range(start, number), own, batched, parts[start], names, always))
                start = number
    return tuple(found)


def _of_users(table: ModelTable) -> Iterator[Operation]:
    """Of a user's own program nothing is known of what is made of what: every product, and every activation that is asked for, is read."""
    for weight in table.weights:
        if weight.stack is not None:
            name = product_of(weight)
            reads = () if weight.ends_layer else (name,)
            yield Operation(
                output=name, inputs=(), reads=reads, weights=(weight.name_in_layer,), stacks=(weight.stack,)
            )
    for row in table.activations:
        # A dispatched token is not kept as a product is.
        weights = () if {"slots", "tokens"} & set(row.logical_axes) else ("a product",)
        yield Operation(output=row.name, inputs=(), reads=(row.name,), weights=weights)


def product_of(weight: Weight) -> str:
    """The name of a product of a user's own program."""
    return f"product of {weight.name_in_layer}"


def check_policy(table: ModelTable, remat: str) -> None:
    """Raises InputError for names and layers of a policy that the model does not have."""
    stacks = {name: range(first, first + num) for name, first, num in stacks_of(table)}
    policy = read_policy(remat)
    taken = {id(policy.of_layer(number, name)) for name, numbers in stacks.items() for number in numbers}
    for part in policy.parts:
        if (part.names or part.layers) and not table.operations:
            raise InputError(
                f"remat is '{remat}', and {table.name} is a program of your own, whose activations have no names here. "
                f"Give one of {', '.join(BASES)}."
            )
        chosen = [name for name, numbers in stacks.items() if part.layers and _has_some(part, name, numbers)]
        if part.layers is not None and not chosen:
            raise InputError(
                f"remat: '{part.layers.text}' is no layer of {table.name}, which has {table.num_layers} layers, numbered from 0, in "
                f"{_stacks_text(stacks)}. Give some of these, as 0:{max(1, table.num_layers // 2)}."
            )
        if part.layers is not None and (part.layers.stop or 0) > table.num_layers:
            raise InputError(
                f"remat: '{part.layers.text}' ends at layer {part.layers.stop}, and {table.name} has {table.num_layers}. "
                f"End at {table.num_layers}."
            )
        if part.layers is not None and id(part) not in taken:
            raise InputError(
                f"--remat: '{part.text}' has no layer of {table.name}: each of '{part.layers.text}' has a part before it. Leave one of them out."
            )
        known = names_that_are_kept(table, chosen or list(stacks))
        for name in part.names:
            if name not in known:
                near = nearest(name, known, 0.4)
                hint = f"Did you mean '{near}'?" if near else f"Known: {', '.join(known)}."
                of = f" in {names_of(chosen)}" if chosen else ""
                raise InputError(f"--remat: no activation of {table.name}{of} is called '{name}'. {hint}")


def names_that_are_kept(table: ModelTable, stacks: Iterable[str]) -> list[str]:
    """The names that a policy may give for the layers of some stacks."""
    found = (one.output for stack in stacks for one in operations_of(table, stack))
    return list(dict.fromkeys((INPUT, *found, WEIGHTS)))


def stacks_of(table: ModelTable) -> Iterator[tuple[str, int, int]]:
    """Each stack of a table, with the number of its first layer in the model and how many it has."""
    seen = set()
    for weight in table.weights:
        if weight.stack is not None and weight.stack not in seen:
            seen.add(weight.stack)
            yield weight.stack, weight.first_layer, weight.num


def operations_of(table: ModelTable, stack: str) -> Iterator[Operation]:
    """The operations of a layer of a stack, in its order."""
    return (one for one in table.operations if not one.stacks or stack in one.stacks)


def _run(
    stack: str,
    layers: range,
    operations: Sequence[Operation],
    experts: frozenset[str],
    part: Part,
    same: Mapping[str, str],
    always: frozenset[str],
) -> Run:
    kept, gathered = _of_base(part.base, operations, experts)
    keep, host, recompute = ({same.get(name, name) for name in getattr(part, how)} for how in CHANGES)
    kept = (kept | keep) - recompute - host - {WEIGHTS, INPUT}
    gathers_again = WEIGHTS in recompute or not (gathered or WEIGHTS in keep)
    read, again = _read_and_made_again(operations, kept | host)
    if (again or host or gathers_again) and always:
        read, again = _read_and_made_again(operations, (kept | host) - always)
    return Run(
        stack=stack,
        layers=layers,
        made=frozenset(one.output for one in operations),
        named=frozenset((kept | host) - {INPUT}),
        saved=frozenset((read | {INPUT}) - host),
        hosted=frozenset((read | {INPUT}) & host),
        again=frozenset(again),
        gathers_again=gathers_again,
    )


def _of_base(base: str, operations: Sequence[Operation], experts: frozenset[str]) -> tuple[set[str], bool]:
    """What a policy by name keeps of activations, and whether the gathered weights. ``experts``: weights whose products are not kept."""
    if base == "none":
        return {one.output for one in operations}, True
    dots = {one.output for one in operations if one.weights and not experts & set(one.weights)}
    return dots if base == "dots" else set(), False


def _read_and_made_again(operations: Iterable[Operation], kept: Iterable[str]) -> tuple[set[str], set[str]]:
    """What the backward pass reads of what is kept, and what it makes again."""
    made_by = {one.output: one for one in operations}
    kept, read, again = set(kept), set[str](), set[str]()
    wanted = [name for one in made_by.values() for name in one.reads]
    while wanted:
        name = wanted.pop()
        if name == INPUT or name in again:
            continue
        if name in kept:
            read.add(name)
            continue
        again.add(name)
        wanted += made_by[name].inputs if name in made_by else ()
    return read, again


def _renamed(operation: Operation, same: Mapping[str, str]) -> Operation:
    """The operation, with one name for each array."""
    if not same:
        return operation
    return Operation(
        output=same.get(operation.output, operation.output),
        inputs=tuple(same.get(name, name) for name in operation.inputs),
        reads=tuple(same.get(name, name) for name in operation.reads),
        weights=operation.weights,
        like=operation.like,
        stacks=operation.stacks,
    )


def _has_some(part: Part, stack: str, numbers: range) -> bool:
    return part.layers is not None and any(part.layers.has(number, stack) for number in numbers)


def _stacks_text(stacks: Mapping[str, range]) -> str:
    return " and ".join(f"'{name}' ({numbers.start}:{numbers.stop})" for name, numbers in stacks.items())
