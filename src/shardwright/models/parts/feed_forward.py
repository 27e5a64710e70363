"""Rows of SwiGLU feed-forward layers (arXiv:2002.05202): dense ones, and the shared experts, which process every token."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.model.table import Activation, Move, Operation, Weight
from shardwright.models.parts.architecture import Architecture, Stack
from shardwright.models.parts.attention import projected
from shardwright.models.parts.rows import TableRows, in_layers_of, kernel, norm, num_layers, operations_in, over_tokens

AFTER_ATTENTION = "residual.middle"
"""The residual stream between the two parts of a layer."""


def dense_feed_forward(architecture: Architecture, width: int) -> TableRows:
    """The feed-forward layers of the stacks without experts; activations are named ``mlp.*``."""
    stacks = tuple(stack for stack in architecture.stacks if not stack.experts)
    return feed_forward(architecture, stacks, width, "mlp", "mlp")


def feed_forward(
    architecture: Architecture, stacks: tuple[Stack, ...], width: int, name: str, published: str, beside: str = ""
) -> TableRows:
    """Rows named ``name.*`` in component ``mlp``. ``published`` is their name inside a layer of a checkpoint. ``beside``: the input of
    another part of the layer, which is made of the same array."""
    if not stacks:
        return TableRows()
    num = num_layers(stacks)
    hidden = Activation(
        name=f"{name}.hidden",
        component="mlp",
        logical_axes=("batch", "length", "mlp"),
        num=num,
        sizes={"mlp": width},
    )
    return TableRows(
        weights=tuple(
            _kernel(architecture, stack, width, name, published, which)
            for stack in stacks
            for which in ("gate", "up", "down")
        ),
        activations=in_layers_of(
            stacks, (projected(f"{name}.input", "mlp", num), hidden, projected(f"{name}.projected", "mlp", num))
        ),
        moves=(
            Move(source="residual.stream", target=f"{name}.input", feeds=(("mlp", "mlp"),), beside=beside),
            Move(source=f"{name}.projected", target="residual.stream", summed=(("mlp", "mlp"),), ends_layer=True),
        ),
        operations=operations_in(stacks, _operations(name)),
    )


def _operations(name: str) -> Iterator[Operation]:
    given, gate, up, hidden = (f"{name}.{of}" for of in ("input", "gate", "up", "hidden"))
    yield Operation(output=given, inputs=(AFTER_ATTENTION,), reads=(AFTER_ATTENTION,))
    for of in (gate, up):
        yield Operation(output=of, inputs=(given,), reads=(given,), weights=(of,), like=hidden)
    yield Operation(output=hidden, inputs=(gate, up), reads=(gate, up))
    yield Operation(output=f"{name}.projected", inputs=(hidden,), reads=(hidden,), weights=(f"{name}.down",))


def feed_forward_norms(architecture: Architecture) -> TableRows:
    """The scale of the norm before each feed-forward layer, which belongs to the residual stream, and what it normalizes."""
    return TableRows(
        operations=(
            Operation(
                output=AFTER_ATTENTION, inputs=("residual.stream", "attention.projected"), like="residual.stream"
            ),
        ),
        weights=tuple(
            norm(
                stack,
                "residual.feed_forward_norm",
                "residual",
                architecture.embed,
                over_tokens("residual"),
                "post_attention_layernorm.weight",
            )
            for stack in architecture.stacks
        ),
    )


def _kernel(architecture: Architecture, stack: Stack, width: int, name: str, published: str, which: str) -> Weight:
    embed, mlp = {"embed": architecture.embed}, {"mlp": width}
    down = which == "down"
    return kernel(
        architecture,
        stack,
        f"{name}.{which}",
        "mlp",
        {**mlp, **embed} if down else {**embed, **mlp},
        torch_dims=(("embed",), ("mlp",)) if down else (("mlp",), ("embed",)),
        storage=("embed", "mlp"),
        contracted=over_tokens("mlp"),
        hugging_face=f"{published}.{which}_proj.weight",
        ends_layer=down,
    )
