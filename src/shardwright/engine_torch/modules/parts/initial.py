"""Initial values of a parameter, however it is sharded: every mesh gives an element the same value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import Initializer
from shardwright.engine_torch.own_program.shards import boxes_of, shards_of
from shardwright.init import tensor_values

InitMethod = Callable[[torch.Tensor], object]
"""What changes a tensor in place to its initial values, as ``torch.nn.init`` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a module. ``shape``: of all ranks together. ``tp_dim``: the dim that tp shards; None: tp replicates it."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    initial: Initializer | InitMethod


NORMAL = Initializer(kind="normal", stddev=0.023)
"""Transformer Engine's default standard deviation."""
ZEROS, ONES = Initializer(kind="zeros"), Initializer(kind="ones")


def weight_initial(init_method: InitMethod | None) -> Initializer | InitMethod:
    return NORMAL if init_method is None else init_method


def new_seed() -> int:
    """A seed from PyTorch's generator of the host, which ``torch.manual_seed`` sets: one for each module, on any mesh."""
    return int(torch.randint(2**62, (), device="cpu").item())


def local_box(parameter: Parameter, size: int, index: int) -> Box:
    """The box of one of ``size`` tp ranks."""
    start, stop = [0] * len(parameter.shape), list(parameter.shape)
    if parameter.tp_dim is not None:
        each = parameter.shape[parameter.tp_dim] // size
        start[parameter.tp_dim], stop[parameter.tp_dim] = index * each, (index + 1) * each
    return Box(tuple(start), tuple(stop))


@torch.no_grad()
def fill(tensor: torch.Tensor, parameter: Parameter, seed: int) -> None:
    """Give a tensor, plain or a DTensor, its initial values in place.

    Those of an ``InitMethod`` are made for the entire tensor, on the host, of which each rank keeps its boxes.
    """
    shards = shards_of(parameter.name, tensor)
    places = boxes_of(shards)
    initial = parameter.initial
    entire = None if isinstance(initial, Initializer) else _entire(initial, parameter.name, parameter.shape, seed)
    for place in places:
        if isinstance(initial, Initializer):
            box = tensor_values(parameter.name, parameter.shape, initial, seed, place.box)
            values = torch.from_numpy(box)
        else:
            assert entire is not None
            values = entire[place.box.slices]
        shards.local[place.local.slices].copy_(values)


def _entire(method: InitMethod, name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        # Of the name too: two weights of one module are not to be equal.
        torch.manual_seed((seed + sum(ord(letter) * 257**place for place, letter in enumerate(name))) % 2**62)
        tensor = torch.empty(tuple(shape), device="cpu")
        method(tensor)
    return tensor
