"""Which elements of which published tensor are which box of ours.

A piece is one box of one of our tensors: a layer, or an expert of a layer. Its elements are consecutive in a published tensor,
with the dims in another order. Import and export use the same view of them, so that each is the inverse of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import ModelTable, Weight
from shardwright.models.hugging_face import per_expert, published_dims, published_names

ExpertsForm = Literal["each", "stacked"]
"""How a folder holds experts: a tensor for each matrix of each expert; or, of a layer, one of all gates and ups and one of
all downs, as transformers 5 holds them in memory."""

EXPERTS = ".experts."
FUSED = {"moe.gate": "gate_up_proj", "moe.up": "gate_up_proj", "moe.down": "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of one of our tensors: the elements from ``start`` of a published tensor. ``index``: layer, or layer and expert."""

    weight: Weight
    index: tuple[int, ...]
    start: int

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of the box without its leading indices."""
        return self.weight.shape[len(self.index) - (self.weight.stack is not None) :]

    @property
    def size(self) -> int:
        return prod(self.inner_shape)

    @property
    def box(self) -> Box:
        """The box, in the tensor with all layers."""
        inner = self.inner_shape
        return Box((*self.index, *(0 for _ in inner)), (*(place + 1 for place in self.index), *inner))

    def in_our_dims(self, elements: np.ndarray) -> np.ndarray:
        """A view of the elements of this piece, flat as they are published, in the shape of ``box``."""
        axes, dims = published_dims(self.weight)
        flat = [name for dim in dims for name in dim]
        tensor = elements.reshape([self.weight.size(name) for name in flat])
        return tensor.transpose([flat.index(name) for name in axes])[(None,) * len(self.index)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """A tensor as it is published, and the pieces that it holds, in order and without a gap."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


def stored_shape(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight in a checkpoint: layers are stacked."""
    return (weight.num, *weight.shape) if weight.stack else weight.shape


def published_tensors(table: ModelTable, experts: ExpertsForm) -> tuple[PublishedTensor, ...]:
    """Every tensor of a published model, in the order of its layers.

    >>> from shardwright.models import build
    >>> last = published_tensors(build("mixtral-test"), "stacked")[-3]
    >>> last.name, last.shape, len(last.pieces)
    ('model.layers.3.mlp.experts.down_proj', (8, 128, 256), 8)
    """
    ends = [weight for weight in table.weights if weight.stack is None]
    before = [weight for weight in ends if weight.component == "embedding"]
    found = [tensor for weight in before for tensor in _of_weight(weight)]
    stacks: dict[str, list[Weight]] = {}
    for weight in table.weights:
        if weight.stack is not None:
            stacks.setdefault(weight.stack, []).append(weight)
    for weights in stacks.values():
        found += _of_stack(weights, experts)
    return (*found, *(tensor for weight in ends if weight not in before for tensor in _of_weight(weight)))


def _of_stack(weights: Sequence[Weight], experts: ExpertsForm) -> Iterator[PublishedTensor]:
    apart = [weight for weight in weights if not (experts == "stacked" and per_expert(weight))]
    columns = [_by_layer(weight, experts) for weight in apart]
    fused = [weight for weight in weights if weight not in apart]
    for layer in range(weights[0].num):
        for column in columns:
            yield from column[layer]
        yield from _fused(fused, layer)


def _by_layer(weight: Weight, experts: ExpertsForm) -> list[list[PublishedTensor]]:
    tensors = list(_of_weight(weight, experts))
    each = len(tensors) // weight.num
    return [tensors[start : start + each] for start in range(0, len(tensors), each)]


def _of_weight(weight: Weight, experts: ExpertsForm = "each") -> Iterator[PublishedTensor]:
    """The tensors of a weight, each with one piece."""
    _, dims = published_dims(weight)
    shape = tuple(prod(weight.size(name) for name in dim) for dim in dims)
    layers: list[tuple[int, ...]] = [(layer,) for layer in range(weight.num)] if weight.stack else [()]
    numbers = range(weight.size("experts")) if per_expert(weight) else None
    indices = layers if numbers is None else [(*layer, expert) for layer in layers for expert in numbers]
    for name, index in zip(published_names(weight), indices, strict=True):
        known = name if experts == "each" else _renamed(name)
        yield PublishedTensor(name=known, shape=shape, pieces=(Piece(weight=weight, index=index, start=0),))


def _fused(weights: Sequence[Weight], layer: int) -> Iterator[PublishedTensor]:
    """The tensors that hold all experts of a layer."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(FUSED[weight.name_in_layer], []).append(weight)
    for name, group in groups.items():
        first = group[0]
        assert first.hugging_face is not None
        _, dims = published_dims(first)
        rows, *rest = (prod(first.size(axis) for axis in dim) for dim in dims)
        num, size = first.size("experts"), rows * prod(rest)
        prefix = first.hugging_face.format(layer=first.first_layer + layer, expert=0).partition(EXPERTS)[0]
        yield PublishedTensor(
            name=_renamed(f"{prefix}{EXPERTS}{name}"),
            shape=(num, rows * len(group), *rest),
            pieces=tuple(
                Piece(weight=weight, index=(layer, expert), start=(expert * len(group) + place) * size)
                for expert in range(num)
                for place, weight in enumerate(group)
            ),
        )


def _renamed(name: str) -> str:
    """Mixtral's module has another name where experts are stacked."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def form_of(names: Mapping[str, object]) -> ExpertsForm:
    """How a folder with these tensors holds experts."""
    stacked = any(name.endswith(f"{EXPERTS}{fused}") for name in names for fused in set(FUSED.values()))
    return "stacked" if stacked else "each"
