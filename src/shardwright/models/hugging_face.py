"""Published checkpoints of our weights: names, and the order of dims."""

from __future__ import annotations

from shardwright.core.model.table import Weight


def published_names(weight: Weight) -> tuple[str, ...]:
    """The published names of a weight: one, one per layer, or one per layer and expert, in order.

    >>> from shardwright.models import build
    >>> for name in published_names(build("mixtral-test").weight("layers.moe.down"))[7:9]:
    ...     print(name)
    model.layers.0.block_sparse_moe.experts.7.w2.weight
    model.layers.1.block_sparse_moe.experts.0.w2.weight
    """
    assert weight.hugging_face is not None, weight.name
    experts = range(weight.size("experts")) if per_expert(weight) else range(1)
    layers = range(weight.first_layer, weight.first_layer + weight.num)
    return tuple(weight.hugging_face.format(layer=layer, expert=expert) for layer in layers for expert in experts)


def per_expert(weight: Weight) -> bool:
    """Whether each expert of the weight is published as a tensor of its own."""
    return "{expert}" in (weight.hugging_face or "")


def published_dims(weight: Weight) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Our dims and the published ones of a single published tensor."""
    axes = weight.logical_axes
    torch_dims = weight.torch_dims or tuple((name,) for name in axes)
    if not per_expert(weight):
        return axes, torch_dims
    return tuple(n for n in axes if n != "experts"), tuple(dim for dim in torch_dims if dim != ("experts",))
