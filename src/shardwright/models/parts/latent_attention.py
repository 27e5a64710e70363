"""Rows of multi-head latent attention: devices exchange the latent, never the keys and values computed from it.

In DeepSeek-V3 a token's latent has 576 elements, its keys and values 40,960.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.model.table import Activation, Move, Operation
from shardwright.models.parts.architecture import Architecture, LatentAttention, Stack
from shardwright.models.parts.attention import (
    ATTENDED,
    NORMALIZED,
    attention_norm,
    mask_inputs,
    output_kernel,
    projected,
    queries,
)
from shardwright.models.parts.rows import TableRows, kernel, norm, num_layers, over_tokens

FEEDS_HEADS = (*over_tokens("attention"), ("attention", "heads"))
"""All heads use the output of a down-projection: its gradient is partial over the axes that shard heads."""


def latent_attention(architecture: Architecture, attention: LatentAttention) -> TableRows:
    """Weights of every stack, and the activations and moves that all layers share."""
    num = num_layers(architecture.stacks)

    def row(name: str, *logical_axes: str, sizes: dict[str, int] | None = None) -> Activation:
        return Activation(
            name=f"attention.{name}", component="attention", logical_axes=("batch", *logical_axes), num=num, sizes=sizes
        )

    values = {"head_dim": attention.value_dim}
    mask_rows, query_rows = mask_inputs(), queries(num, values)
    return TableRows(
        weights=tuple(
            weight
            for stack in architecture.stacks
            for weight in (attention_norm(architecture, stack), *_kernels(architecture, attention, stack))
        ),
        activations=(
            *mask_rows.activations,
            row("input", "length", "embed"),
            *((row("query_latent", "length", "q_lora"),) if attention.q_lora else ()),
            row("latent", "length", "latent"),
            row("latent_attended", "kv_length", "latent"),
            row("keys_attended", "kv_length", "heads", "head_dim"),
            row("values_attended", "kv_length", "heads", "head_dim", sizes=values),
            *query_rows.activations,
            projected("attention.projected", "attention", num),
        ),
        moves=(
            *mask_rows.moves,
            Move(source="residual.stream", target="attention.input", feeds=(("attention", "heads"),)),
            Move(
                source="attention.latent",
                target="attention.latent_attended",
                feeds=(("attention", "length"),),
                renamed={"length": "kv_length"},
                kind="keys",
            ),
            *query_rows.moves,
            Move(source="attention.projected", target="residual.stream", summed=(("attention", "heads"),)),
        ),
        operations=(NORMALIZED, *_operations(attention), *ATTENDED),
    )


def _operations(attention: LatentAttention) -> Iterator[Operation]:
    def product(output: str, source: str, weight: str) -> Operation:
        inputs = (f"attention.{source}",)
        return Operation(output=f"attention.{output}", inputs=inputs, reads=inputs, weights=(f"attention.{weight}",))

    if attention.q_lora is None:
        yield product("queries", "input", "q")
    else:
        yield product("query_latent", "input", "q_down")
        yield product("queries", "query_latent", "q_up")
    yield Operation(output="attention.queries_attended", inputs=("attention.queries",))
    yield product("latent", "input", "kv_down")
    # Its norm reads the latent.
    yield Operation(output="attention.latent_attended", inputs=("attention.latent",), reads=("attention.latent",))
    yield product("keys_attended", "latent_attended", "kv_up")
    yield product("values_attended", "latent_attended", "kv_up")


def _kernels(architecture: Architecture, attention: LatentAttention, stack: Stack):
    embed, heads = {"embed": architecture.embed}, {"heads": attention.heads}
    if attention.q_lora is None:
        yield kernel(
            architecture,
            stack,
            "attention.q",
            "attention",
            {**embed, **heads, "head_dim": attention.head_dim},
            torch_dims=(("heads", "head_dim"), ("embed",)),
            storage=("embed", "heads"),
            contracted=over_tokens("attention"),
            hugging_face="self_attn.q_proj.weight",
        )
    else:
        yield kernel(
            architecture,
            stack,
            "attention.q_down",
            "attention",
            {**embed, "q_lora": attention.q_lora},
            torch_dims=(("q_lora",), ("embed",)),
            storage=("embed", "q_lora"),
            contracted=FEEDS_HEADS,
            hugging_face="self_attn.q_a_proj.weight",
        )
        yield norm(
            stack, "attention.q_norm", "attention", attention.q_lora, FEEDS_HEADS, "self_attn.q_a_layernorm.weight"
        )
        yield kernel(
            architecture,
            stack,
            "attention.q_up",
            "attention",
            {"q_lora": attention.q_lora, **heads, "head_dim": attention.head_dim},
            torch_dims=(("heads", "head_dim"), ("q_lora",)),
            storage=("q_lora", "heads"),
            contracted=over_tokens("attention"),
            hugging_face="self_attn.q_b_proj.weight",
        )
    yield kernel(
        architecture,
        stack,
        "attention.kv_down",
        "attention",
        {**embed, "latent": attention.latent},
        torch_dims=(("latent",), ("embed",)),
        storage=("embed", "latent"),
        contracted=FEEDS_HEADS,
        hugging_face="self_attn.kv_a_proj_with_mqa.weight",
    )
    yield norm(
        stack, "attention.kv_norm", "attention", attention.kv_lora, FEEDS_HEADS, "self_attn.kv_a_layernorm.weight"
    )
    yield kernel(
        architecture,
        stack,
        "attention.kv_up",
        "attention",
        {"kv_lora": attention.kv_lora, **heads, "head_dim": attention.nope_dim + attention.value_dim},
        torch_dims=(("heads", "head_dim"), ("kv_lora",)),
        storage=("kv_lora", "heads"),
        contracted=over_tokens("attention"),
        hugging_face="self_attn.kv_b_proj.weight",
        # Devices exchange the latent, and compute keys and values of all tokens that they attend to.
        tokens=("batch", "kv_length"),
    )
    yield output_kernel(architecture, stack, attention.heads, attention.value_dim)
