"""Rows of a table, and helpers that make weights and norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwright.core.model.table import Activation, Contraction, Initializer, Move, Operation, Weight
from shardwright.models.parts.architecture import Architecture, Stack

LAYER = "model.layers.{layer}."
"""Prefix of the published names of weights in layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Weights, activations and moves of one part of a model, and the operations of its layers."""

    weights: tuple[Weight, ...] = ()
    activations: tuple[Activation, ...] = ()
    moves: tuple[Move, ...] = ()
    operations: tuple[Operation, ...] = ()


def joined(groups: Iterable[TableRows]) -> TableRows:
    """All rows of all groups, in order."""
    groups = tuple(groups)
    return TableRows(
        weights=tuple(row for group in groups for row in group.weights),
        activations=tuple(row for group in groups for row in group.activations),
        moves=tuple(row for group in groups for row in group.moves),
        operations=tuple(row for group in groups for row in group.operations),
    )


def kernel(
    architecture: Architecture,
    stack: Stack | None,
    name: str,
    component: str,
    dims: dict[str, int],
    torch_dims: tuple[tuple[str, ...], ...],
    storage: tuple[str, ...],
    contracted: tuple[Contraction, ...],
    hugging_face: str,
    in_use_dtype: str | None = None,
    uses: tuple[str, ...] = (),
    ends_layer: bool = False,
    tokens: tuple[str, ...] = ("batch", "length"),
) -> Weight:
    """A matrix, initialised from a normal distribution with the standard deviation of the published configs."""
    return Weight(
        name=f"{stack.name}.{name}" if stack else name,
        component=component,
        logical_axes=tuple(dims),
        shape=tuple(dims.values()),
        initializer=Initializer(kind="normal", stddev=architecture.initializer_stddev),
        contracted=contracted,
        storage=storage,
        torch_dims=torch_dims,
        hugging_face=(LAYER if stack else "") + hugging_face,
        in_use_dtype=in_use_dtype,
        uses=uses,
        ends_layer=ends_layer,
        tokens=tokens,
        **_stacked(stack),
    )


def norm(
    stack: Stack | None, name: str, component: str, width: int, contracted: tuple[Contraction, ...], hugging_face: str
) -> Weight:
    """The scale of an RMS norm: one-dimensional, and unsharded at rest, because an all-gather of it would only cost latency."""
    return Weight(
        name=f"{stack.name}.{name}" if stack else name,
        component=component,
        logical_axes=("norm",),
        shape=(width,),
        initializer=Initializer(kind="ones"),
        contracted=contracted,
        hugging_face=(LAYER if stack else "") + hugging_face,
        in_use_dtype="float32",
        **_stacked(stack),
    )


def over_tokens(component: str) -> tuple[Contraction, ...]:
    """The dims over which the gradient of a weight used in ``component`` is summed."""
    return (component, "batch"), (component, "length")


def in_layers_of(stacks: Iterable[Stack], activations: Iterable[Activation]) -> tuple[Activation, ...]:
    """The activations, restricted to the layers of the given stacks."""
    names = tuple(stack.name for stack in stacks)
    return tuple(replace(row, stacks=names) for row in activations)


def operations_in(stacks: Iterable[Stack], operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The operations, restricted to the layers of the given stacks."""
    names = tuple(stack.name for stack in stacks)
    return tuple(replace(row, stacks=names) for row in operations)


def num_layers(stacks: Iterable[Stack]) -> int:
    return sum(stack.num for stack in stacks)


def _stacked(stack: Stack | None) -> dict:
    return {"num": stack.num, "stack": stack.name, "first_layer": stack.first_layer} if stack else {}
