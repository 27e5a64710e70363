"""Rows of experts: the router with its token-expert assignments, then the experts."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.model.precision import PRECISION, own_dtype
from shardwright.core.model.table import Activation, Initializer, Move, Operation, Weight
from shardwright.models.parts.architecture import Architecture, Experts, Stack
from shardwright.models.parts.feed_forward import AFTER_ATTENTION, feed_forward
from shardwright.models.parts.rows import (
    LAYER,
    TableRows,
    in_layers_of,
    joined,
    kernel,
    num_layers,
    operations_in,
    over_tokens,
)

TOKENS = ("batch", "length")
GROUPED = ("batch", "groups", "tokens")
EXPERT_SIDE = ("experts", "batch", "groups", "slots", "embed")
OVER_HIDDEN = (("moe", "mlp"),)
ROUTED = own_dtype(PRECISION["router"].kept)


OPERATIONS = (
    Operation(output="router.input", inputs=(AFTER_ATTENTION,), reads=(AFTER_ATTENTION,)),
    Operation(output="router.scores", inputs=("router.input",), reads=("router.input",), weights=("router.kernel",)),
    Operation(output="router.experts", inputs=("router.scores",)),
    Operation(output="router.chosen", inputs=("router.scores",), reads=("router.scores",)),
    Operation(output="router.grouped", inputs=("router.input",)),
    Operation(output="router.grouped_experts", inputs=("router.experts",)),
    Operation(output="router.weights", inputs=("router.chosen",)),
    Operation(output="router.dispatched", inputs=("router.grouped", "router.grouped_experts")),
    Operation(output="moe.dispatched", inputs=("router.dispatched",)),
    *(
        Operation(
            output=name, inputs=("moe.dispatched",), reads=("moe.dispatched",), weights=(name,), like="moe.hidden"
        )
        for name in ("moe.gate", "moe.up")
    ),
    # The hidden units are made of gate and up again wherever they are multiplied: an engine has no array of them to keep.
    Operation(output="moe.output", inputs=("moe.gate", "moe.up"), reads=("moe.gate", "moe.up"), weights=("moe.down",)),
    Operation(output="router.returned", inputs=("moe.output",)),
    Operation(
        output="router.combined",
        inputs=("router.returned", "router.weights"),
        reads=("router.returned", "router.weights", "router.grouped_experts"),
    ),
)
"""From the residual stream to the sum of a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNames:
    """The names of a layer's expert weights in the checkpoints of a family."""

    router: str
    gate: str
    up: str
    down: str
    bias: str = ""
    shared: str = ""


def experts_feed_forward(architecture: Architecture, experts: Experts, names: PublishedNames) -> TableRows:
    """The feed-forward layers of the stacks that have experts, including shared experts."""
    stacks = tuple(stack for stack in architecture.stacks if stack.experts)
    if not stacks:
        return TableRows()
    routed = TableRows(
        weights=tuple(weight for stack in stacks for weight in _weights(architecture, experts, names, stack)),
        activations=in_layers_of(stacks, _activations(experts, num_layers(stacks))),
        moves=(
            Move(source="input.segments", target="router.valid"),
            Move(source="residual.stream", target="router.input"),
            *(
                # Where hidden units are sharded, an expert's output is partial. It is summed once, after the outputs of a
                # token's experts are combined. So the cotangent of the experts' input is partial until the router has it.
                Move(
                    source=f"router.{source}",
                    target=f"router.{target}",
                    renamed={"length": "groups"},
                    feeds=OVER_HIDDEN,
                )
                for source, target in (("input", "grouped"), ("experts", "grouped_experts"), ("chosen", "weights"))
            ),
            Move(source="router.dispatched", target="moe.dispatched", kind="dispatch"),
            Move(source="moe.output", target="router.returned", kind="combine"),
            Move(
                source="router.combined",
                target="router.output",
                renamed={"groups": "length"},
                summed=OVER_HIDDEN,
                ends_layer=True,
            ),
            Move(
                source="router.output",
                target="residual.stream",
                ends_layer=True,
                beside="shared.projected" if experts.shared_width else "",
            ),
        ),
        operations=operations_in(stacks, OPERATIONS),
    )
    if not experts.shared_width:
        return routed
    shared = feed_forward(architecture, stacks, experts.shared_width, "shared", names.shared, beside="router.input")
    return joined((routed, shared))


def _activations(experts: Experts, num: int) -> tuple[Activation, ...]:
    def row(name: str, *logical_axes: str, dtype: str | None = None) -> Activation:
        component = name.split(".")[0]
        sizes = {"mlp": experts.width} if "mlp" in logical_axes else None
        return Activation(name=name, component=component, logical_axes=logical_axes, num=num, dtype=dtype, sizes=sizes)

    return (
        Activation(name="router.valid", component="router", logical_axes=TOKENS, dtype="int32"),
        row("router.input", *TOKENS, "embed"),
        row("router.scores", *TOKENS, "scores", dtype=ROUTED),
        row("router.experts", *TOKENS, "top_k", dtype="int32"),
        row("router.chosen", *TOKENS, "top_k", dtype=ROUTED),
        row("router.grouped", *GROUPED, "embed"),
        row("router.grouped_experts", *GROUPED, "top_k", dtype="int32"),
        row("router.weights", *GROUPED, "top_k", dtype=ROUTED),
        row("router.dispatched", *GROUPED, "top_k", "embed"),
        row("moe.dispatched", *EXPERT_SIDE),
        row("moe.hidden", "experts", "batch", "groups", "slots", "mlp"),
        row("moe.output", *EXPERT_SIDE),
        row("router.returned", *GROUPED, "top_k", "embed"),
        row("router.combined", *GROUPED, "embed"),
        row("router.output", *TOKENS, "embed"),
    )


def _weights(architecture: Architecture, experts: Experts, names: PublishedNames, stack: Stack) -> list[Weight]:
    embed, width = {"embed": architecture.embed}, {"mlp": experts.width}
    weights = [
        kernel(
            architecture,
            stack,
            "router.kernel",
            "router",
            {**embed, "scores": experts.num},
            torch_dims=(("scores",), ("embed",)),
            storage=("embed", "scores"),
            contracted=over_tokens("router"),
            hugging_face=names.router,
            in_use_dtype=own_dtype(PRECISION["router"].computed),
        )
    ]
    if experts.balanced_by_bias:
        weights.append(
            Weight(
                name=f"{stack.name}.router.bias",
                component="router",
                logical_axes=("scores",),
                shape=(experts.num,),
                initializer=Initializer(kind="zeros"),
                contracted=(),
                num=stack.num,
                stack=stack.name,
                first_layer=stack.first_layer,
                frozen=True,
                hugging_face=LAYER + names.bias,
                in_use_dtype=own_dtype(PRECISION["router"].computed),
            )
        )
    for which, published in (("gate", names.gate), ("up", names.up), ("down", names.down)):
        down = which == "down"
        weights.append(
            kernel(
                architecture,
                stack,
                f"moe.{which}",
                "moe",
                {"experts": experts.num, **(width if down else embed), **(embed if down else width)},
                torch_dims=(("experts",), ("embed",), ("mlp",)) if down else (("experts",), ("mlp",), ("embed",)),
                storage=("embed", "mlp"),
                contracted=(("moe", "batch"), ("moe", "groups")),
                hugging_face=published,
            )
        )
    return weights
