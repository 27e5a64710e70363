"""Converts between our weights and published checkpoints: names, and the order of dims.

Arrays are anything with ``transpose``, ``reshape`` and indexing (NumPy, JAX); nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

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


def to_published(weight: Weight, array: Any) -> Iterator[tuple[str, Any]]:
    """Each published tensor of a weight: ``array`` holds all its layers, stacked if it has a stack."""
    names = iter(published_names(weight))
    for layer in array if weight.stack else [array]:
        for tensor in layer if per_expert(weight) else [layer]:
            yield next(names), _as_published(weight, tensor)


def from_published(weight: Weight, read: Callable[[str], Any], stack: Callable[[Sequence[Any]], Any]) -> Any:
    """A weight with all its layers from published tensors. ``stack`` stacks arrays along a new first dim."""
    tensors = [_as_ours(weight, read(name)) for name in published_names(weight)]
    if per_expert(weight):
        num = weight.size("experts")
        tensors = [stack(tensors[start : start + num]) for start in range(0, len(tensors), num)]
    return stack(tensors) if weight.stack else tensors[0]


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


def _as_published(weight: Weight, tensor: Any) -> Any:
    axes, torch_dims = published_dims(weight)
    order = [axes.index(name) for dim in torch_dims for name in dim]
    return tensor.transpose(order).reshape([prod(weight.size(name) for name in dim) for dim in torch_dims])


def _as_ours(weight: Weight, tensor: Any) -> Any:
    axes, torch_dims = published_dims(weight)
    flat = [name for dim in torch_dims for name in dim]
    return tensor.reshape([weight.size(name) for name in flat]).transpose([flat.index(name) for name in axes])
