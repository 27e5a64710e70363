"""Rows of grouped-query attention: devices exchange keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.model.table import Activation, Move, Operation
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, Stack
from shardwright.models.parts.rows import TableRows, kernel, norm, num_layers, over_tokens

HEADS = (("attention", "heads"), ("attention", "kv_heads"))

OPERANDS = ("attention.queries_attended", "attention.keys_attended", "attention.values_attended")

NORMALIZED = Operation(output="attention.input", inputs=("residual.stream",), reads=("residual.stream",))
"""The norm before attention."""

ATTENDED = (
    Operation(output="attention.attended", inputs=OPERANDS, reads=(*OPERANDS, "attention.attended")),
    Operation(output="attention.output", inputs=("attention.attended",)),
    Operation(
        output="attention.projected",
        inputs=("attention.output",),
        reads=("attention.output",),
        weights=("attention.o",),
    ),
)
"""From queries, keys and values to what attention adds to the residual stream."""


def grouped_query_attention(architecture: Architecture, attention: GroupedQueryAttention) -> TableRows:
    """Weights of every stack, and the activations and moves that all layers share."""
    num = num_layers(architecture.stacks)
    kv = ("batch", "length", "kv_heads", "head_dim")
    kv_attended = ("batch", "kv_length", "kv_heads", "head_dim")
    mask_rows, query_rows = mask_inputs(), queries(num, value_sizes=None)
    return TableRows(
        weights=tuple(
            weight
            for stack in architecture.stacks
            for weight in (attention_norm(architecture, stack), *_kernels(architecture, attention, stack))
        ),
        activations=(
            *mask_rows.activations,
            Activation(
                name="attention.input", component="attention", logical_axes=("batch", "length", "embed"), num=num
            ),
            Activation(name="attention.keys", component="attention", logical_axes=kv, num=num),
            Activation(name="attention.values", component="attention", logical_axes=kv, num=num),
            Activation(name="attention.keys_attended", component="attention", logical_axes=kv_attended, num=num),
            Activation(name="attention.values_attended", component="attention", logical_axes=kv_attended, num=num),
            *query_rows.activations,
            projected("attention.projected", "attention", num),
        ),
        moves=(
            *mask_rows.moves,
            Move(source="residual.stream", target="attention.input", feeds=HEADS),
            *(
                Move(
                    source=f"attention.{what}",
                    target=f"attention.{what}_attended",
                    feeds=(("attention", "length"),),
                    renamed={"length": "kv_length"},
                    kind="keys",
                )
                for what in ("keys", "values")
            ),
            *query_rows.moves,
            Move(source="attention.projected", target="residual.stream", summed=(("attention", "heads"),)),
        ),
        operations=(
            NORMALIZED,
            *(
                Operation(
                    output=f"attention.{what}",
                    inputs=("attention.input",),
                    reads=("attention.input",),
                    weights=(f"attention.{weight}",),
                )
                for what, weight in (("queries", "q"), ("keys", "k"), ("values", "v"))
            ),
            *(
                Operation(output=f"attention.{what}_attended", inputs=(f"attention.{what}",))
                for what in ("queries", "keys", "values")
            ),
            *ATTENDED,
        ),
    )


def queries(num: int, value_sizes: Mapping[str, int] | None) -> TableRows:
    """Queries as projected and as they attend, and the outputs of attention in both layouts. ``value_sizes``: dims of
    values whose size is not that of queries."""
    query_axes, attended_axes = ("batch", "length", "heads", "head_dim"), ("batch", "q_length", "heads", "head_dim")

    def row(name: str, logical_axes: tuple[str, ...], sizes: Mapping[str, int] | None = None) -> Activation:
        return Activation(
            name=f"attention.{name}", component="attention", logical_axes=logical_axes, num=num, sizes=sizes
        )

    return TableRows(
        activations=(
            row("queries", query_axes),
            row("queries_attended", attended_axes),
            row("attended", attended_axes, value_sizes),
            row("output", query_axes, value_sizes),
        ),
        moves=(
            Move(
                source="attention.queries",
                target="attention.queries_attended",
                renamed={"length": "q_length"},
                kind="queries",
            ),
            Move(
                source="attention.attended", target="attention.output", renamed={"q_length": "length"}, kind="queries"
            ),
        ),
    )


def mask_inputs() -> TableRows:
    """Positions and segments, from which the attention mask is made, for queries and keys. Resharded once a step, not per layer."""
    what = ("positions", "segments")
    sides = {"": "length", "q_": "q_length", "kv_": "kv_length"}
    return TableRows(
        activations=tuple(
            Activation(
                name=f"attention.{side}{of}", component="attention", logical_axes=("batch", length), dtype="int32"
            )
            for side, length in sides.items()
            for of in what
        ),
        moves=(
            *(Move(source=f"input.{of}", target=f"attention.{of}") for of in what),
            *(
                Move(source=f"attention.{of}", target=f"attention.{side}{of}", renamed={"length": length})
                for side, length in sides.items()
                if side
                for of in what
            ),
        ),
    )


def _kernels(architecture: Architecture, attention: GroupedQueryAttention, stack: Stack):
    inputs = {"embed": architecture.embed}
    for name, heads, num in (
        ("q", "heads", attention.heads),
        ("k", "kv_heads", attention.kv_heads),
        ("v", "kv_heads", attention.kv_heads),
    ):
        yield kernel(
            architecture,
            stack,
            f"attention.{name}",
            "attention",
            {**inputs, heads: num, "head_dim": attention.head_dim},
            torch_dims=((heads, "head_dim"), ("embed",)),
            storage=("embed", heads),
            contracted=over_tokens("attention"),
            hugging_face=f"self_attn.{name}_proj.weight",
        )
    yield output_kernel(architecture, stack, attention.heads, attention.head_dim)


def attention_norm(architecture: Architecture, stack: Stack):
    """The scale of the norm before attention, which belongs to the residual stream."""
    return norm(
        stack,
        "residual.attention_norm",
        "residual",
        architecture.embed,
        over_tokens("residual"),
        "input_layernorm.weight",
    )


def output_kernel(architecture: Architecture, stack: Stack, heads: int, head_dim: int):
    """The projection from all heads back to the width of the residual stream."""
    return kernel(
        architecture,
        stack,
        "attention.o",
        "attention",
        {"heads": heads, "head_dim": head_dim, "embed": architecture.embed},
        torch_dims=(("embed",), ("heads", "head_dim")),
        storage=("embed", "heads"),
        contracted=over_tokens("attention"),
        hugging_face="self_attn.o_proj.weight",
    )


def projected(name: str, component: str, num: int) -> Activation:
    """The output of a component, which is added to the residual stream."""
    return Activation(name=name, component=component, logical_axes=("batch", "length", "embed"), num=num)
