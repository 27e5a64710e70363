"""The rows that follow from a model's program are those that were typed by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from shardwright.core.model.table import Activation, ModelTable, Move, Operation
from shardwright.core.program.rows import Rows, rows_of
from shardwright.core.program.weights import LAYER
from shardwright.models import build, names
from shardwright.models.layers.decoder import program_of

DRAWN = [f"{family}-test" for family in ("llama3", "mixtral", "deepseek3")]


def options_of(draw: Random, family: str) -> dict[str, str]:
    """Options of a model, drawn: of its shape, and of what it has."""
    options = {"embed": str(64 * draw.randint(1, 3)), "vocab": str(draw.choice((512, 1000))), "head_dim": "8"}
    if family.startswith("deepseek3"):
        layers = draw.randint(1, 6)
        del options["head_dim"]
        return {
            **options,
            "num_layers": str(layers),
            "num_dense_layers": str(draw.randint(0, layers)),
            "q_lora": draw.choice(("none", "16")),
            "kv_lora": draw.choice(("8", "24")),
            "num_shared_experts": str(draw.randint(0, 2)),
            "routing_bias": draw.choice(("true", "false")),
            "capacity_factor": draw.choice(("none", "1.5")),
            "value_dim": draw.choice(("128", "64")),
        }
    options |= {"window": draw.choice(("none", "32")), "num_kv_heads": draw.choice(("1", "4"))}
    if family.startswith("mixtral"):
        return {**options, "capacity_factor": draw.choice(("none", "1.5")), "top_k": str(draw.randint(1, 4))}
    return {**options, "tied": draw.choice(("true", "false"))}


def cases() -> list[tuple[str, dict[str, str]]]:
    draw = Random(38)
    return [(name, {}) for name in names()] + [(name, options_of(draw, name)) for name in DRAWN for _ in range(20)]


def with_stacks(table: ModelTable, row: Activation | Operation) -> Activation | Operation:
    """A row that says its stacks where it is that of all."""
    once = isinstance(row, Activation) and ((row.num == 1 and not row.stacks) or row.name == "residual.stream")
    outside = isinstance(row, Activation) and row.name.partition(".")[0] in ("input", "embedding", "logits", "residual")
    of_mask = row.name.endswith(("positions", "segments")) if isinstance(row, Activation) else False
    if (once and table.num_layers > 1) or outside or of_mask:
        return row
    return replace(row, stacks=row.stacks or tuple(stack.name for stack in table.architecture.stacks))


def typed(table: ModelTable) -> Rows:
    """The rows of a table. Sizes are given where they differ from the table's; integers have no cotangent; and what is combined is made
    of the experts of a token too."""
    integers = {row.name for row in table.activations if row.dtype in ("int32", "bool")}

    def activation(row: Activation) -> Activation:
        sizes = {axis: size for axis, size in (row.sizes or {}).items() if table.sizes.get(axis) != size}
        return replace(with_stacks(table, row), sizes=sizes or None)

    def move(row: Move) -> Move:
        return replace(row, feeds=() if row.source in integers else row.feeds)

    def operation(row: Operation) -> Operation:
        extra = ("router.grouped_experts",) if row.output == "router.combined" else ()
        return replace(with_stacks(table, row), inputs=(*row.inputs, *extra))

    return Rows(
        weights=table.weights,
        activations=tuple(map(activation, table.activations)),
        moves=tuple(map(move, table.moves)),
        operations=tuple(map(operation, table.operations)),
    )


@pytest.mark.parametrize(("name", "options"), cases())
def test_derived_rows_are_the_typed_ones(name: str, options: dict[str, str]) -> None:
    table = build(name, options)
    published = {w.name_in_layer: (w.hugging_face or "").removeprefix(LAYER) for w in table.weights}
    assert rows_of(program_of(table.architecture), published) == typed(table)
