"""Our weights as published tensors: one array after the other, and not by the pieces that import and export use."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from shardwright.core.model.table import Weight
from shardwright.models.hugging_face import per_expert, published_dims, published_names


def to_published(weight: Weight, array: Any) -> Iterator[tuple[str, Any]]:
    """Each published tensor of a weight: ``array`` holds all its layers, stacked if it has a stack."""
    names = iter(published_names(weight))
    for layer in array if weight.stack else [array]:
        for tensor in layer if per_expert(weight) else [layer]:
            yield next(names), _as_published(weight, tensor)


def _as_published(weight: Weight, tensor: Any) -> Any:
    axes, torch_dims = published_dims(weight)
    order = [axes.index(name) for dim in torch_dims for name in dim]
    return tensor.transpose(order).reshape([prod(weight.size(name) for name in dim) for dim in torch_dims])
