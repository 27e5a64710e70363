"""The weights of a program as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.model.table import Contraction, Weight
from shardwright.core.program.dims import LETTERS, STORAGE
from shardwright.core.program.kept import Layer
from shardwright.core.program.primitives import Product
from shardwright.core.program.program import Program, Step, WeightUse
from shardwright.core.program.sums import ProgramSums

LAYER = "model.layers.{layer}."
"""Prefix of the published names of weights in layers."""


def weights_of(
    program: Program, sums: ProgramSums, layers: Mapping[str, Layer], published: Mapping[str, str]
) -> Iterator[Weight]:
    """The weights of each section, stack by stack; of the two ends, matrices before norms.

    Raises InputError for a weight without a published name.
    """
    stacks = [None, *(stack.name for stack in program.stacks)]
    steps = [step for step in program.in_sections() if step.weights]
    sections = [step.section for step in steps]

    def key(step: Step) -> tuple[int, int, bool]:
        is_last = step.stack is None and len(step.weights[0].shape) == 1
        return sections.index(step.section), stacks.index(step.stack), is_last

    rows: dict[str, Weight] = {}
    for step in sorted(steps, key=key):
        for use in step.weights:
            contracted = () if use.frozen else sums.gradients[step]
            name = use.name if step.stack is None else f"{step.stack}.{use.name}"
            if name in rows:
                first = rows[name]
                uses = (*first.uses, use.component)
                rows[name] = replace(first, contracted=(*first.contracted, *contracted), uses=uses)
                continue
            if use.name not in published:
                raise InputError(f"weight '{use.name}' has no published name. {did_you_mean(use.name, published)}")
            rows[name] = _row(program, step, use, name, layers, contracted, published[use.name])
    return iter(rows.values())


def _row(
    program: Program,
    step: Step,
    use: WeightUse,
    name: str,
    layers: Mapping[str, Layer],
    contracted: tuple[Contraction, ...],
    published: str,
) -> Weight:
    row = Weight(
        name=name,
        component=use.component,
        logical_axes=use.logical_axes,
        shape=use.shape,
        initializer=use.initializer,
        contracted=contracted,
        storage=_storage(use.logical_axes),
        torch_dims=use.torch_dims,
        frozen=use.frozen,
        hugging_face=published,
        in_use_dtype=use.in_use_dtype,
        tokens=_tokens_of(step),
    )
    stack = program.stack(step.stack)
    if stack is None:
        return row
    return replace(
        row,
        hugging_face=LAYER + published,
        num=stack.num,
        stack=stack.name,
        first_layer=stack.first_layer,
        ends_layer=isinstance(step.does, Product) and layers[stack.name].ends(step),
    )


def _storage(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The dims that may be sharded at rest. A vector has none: an all-gather of it would only cost latency."""
    return tuple(axis for axis in STORAGE if axis in axes) if len(axes) > 1 else ()


def _tokens_of(step: Step) -> tuple[str, ...]:
    """The dims of the tokens that a weight is multiplied with, except for experts."""
    if not isinstance(step.does, Product) or step.does.dims.batched:
        return ("batch", "length")
    return tuple(LETTERS[dim] for dim in step.does.dims.tokens)
