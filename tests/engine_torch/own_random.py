"""What ranks do with modules whose recipe has random bits: one layer on a mesh of data 2 x tp 2, or in one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine_torch.modules import Linear
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from tests.engine_torch.own_modules import entire

INPUTS, OUTPUTS = 64, 96
IN_ORDER, MIXED = ((0, 1), (2, 3)), ((0, 3), (1, 2))
"""The ranks of tp, for each of two groups of tokens."""


class Layer(NamedTuple):
    mode: Mode | None
    sequence_parallel: bool
    shape: tuple[int, ...]
    """Of all tokens."""


LAYERS = [Layer(*one) for one in product((None, "column", "row"), (False, True), ((128,), (8, 16), (4, 2, 16)))]
Gradients = Mapping[str, np.ndarray]


def made(layer: Layer) -> Linear:
    torch.manual_seed(11)
    return Linear(INPUTS, OUTPUTS, parallel_mode=layer.mode, sequence_parallel=layer.sequence_parallel, recipe="nvfp4")


def drawn(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens, and the cotangent of all outputs."""
    generator = torch.Generator().manual_seed(12)
    x, cotangent = (torch.randn(*layer.shape, size, generator=generator) for size in (INPUTS, OUTPUTS))
    return x, cotangent


def alone(layer: Layer, passes: int = 1) -> Gradients:
    """The gradients of the last of some passes."""
    module, (x, cotangent) = made(layer), drawn(layer)
    for _ in range(passes):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        module(leaf).backward(cotangent)
    assert leaf.grad is not None
    return {"x": leaf.grad.numpy(), "weight": gradient(module, "weight"), "bias": gradient(module, "bias")}


def gradient(module: Linear, name: str) -> np.ndarray:
    found = getattr(module, name).grad
    assert found is not None, name
    return entire(found)


def on_mesh(layer: Layer, ranks: tuple[tuple[int, int], tuple[int, int]]) -> Gradients:
    """The entire gradients, with those of all tokens."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("data", "tp"))
    data, tp = mesh.get_coordinate() or ()
    module = made(layer)
    module.set_device_mesh(mesh["tp"], amax_group=dist.group.WORLD)
    x, cotangent = (one.chunk(2)[data] for one in drawn(layer))
    if layer.sequence_parallel and layer.mode != "row":
        x = x.chunk(2)[tp]
    if layer.sequence_parallel and layer.mode != "column":
        cotangent = cotangent.chunk(2)[tp]
    if layer.mode == "row":
        x = x.chunk(2, dim=-1)[tp]
    if layer.mode == "column":
        cotangent = cotangent.chunk(2, dim=-1)[tp]
    leaf = x.clone().requires_grad_()
    module(leaf).backward(cotangent)
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        if layer.mode is None and not layer.sequence_parallel:
            # Ranks of tp that hold the same must draw the same.
            own = parameter.grad.to_local().clone()
            other = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(other, own, group=mesh.get_group("tp"))
            assert torch.equal(*other), name
        total = torch.from_numpy(entire(parameter.grad))
        # Every rank of tp has it.
        dist.all_reduce(total)
        total /= 2
        found[name] = total.numpy()
    assert leaf.grad is not None
    d_x = leaf.grad
    if layer.mode == "row":
        d_x = joined(d_x, mesh.get_group("tp"), -1)
    elif layer.sequence_parallel:
        d_x = joined(d_x, mesh.get_group("tp"), 0)
    of_all = [torch.empty_like(d_x) for _ in range(4)]
    dist.all_gather(of_all, d_x.contiguous())
    firsts = sorted(min(pair) for pair in ranks)
    found["x"] = torch.cat([of_all[first] for first in firsts]).numpy()
    return found


def joined(own: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Those of all ranks of a group, in the mesh's order."""
    of_all = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(of_all, own.contiguous(), group=group)
    return torch.cat(of_all, dim)


def all_layers(ranks: tuple[tuple[int, int], tuple[int, int]]) -> list[Gradients]:
    return [on_mesh(layer, ranks) for layer in LAYERS]


def in_no_rows(length: int, grouped: bool) -> tuple[bool, bool]:
    """Whether two ranks that have the same tokens, among those of both, have equal gradients of the weight and of their tokens."""
    group = None
    if grouped:
        group = dist.group.WORLD
    torch.manual_seed(11)
    module = Linear(INPUTS, OUTPUTS, recipe="nvfp4", amax_group=group)
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(length, INPUTS, generator=generator).requires_grad_()
    module(x).backward(torch.randn(length, OUTPUTS, generator=generator))
    assert x.grad is not None
    return equal_on_all(torch.from_numpy(gradient(module, "weight"))), equal_on_all(x.grad)


def equal_on_all(own: torch.Tensor) -> bool:
    of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, own)
    return all(torch.equal(one, own) for one in of_all)


def compiled() -> bool:
    """Whether a compiled module, whose first pass asks the ranks of a group, draws what another does."""
    found = []
    x, cotangent = (one.chunk(2)[dist.get_rank()] for one in drawn(LAYERS[0]))
    for run in (torch.compile, lambda one, **_: one):
        torch.manual_seed(11)
        module = Linear(INPUTS, OUTPUTS, recipe="nvfp4", amax_group=dist.group.WORLD)
        with warnings.catch_warnings():
            # PyTorch's own, of what it traces.
            warnings.simplefilter("ignore")
            run(module, backend="eager")(x).backward(cotangent)
        found.append(torch.from_numpy(gradient(module, "weight")))
    return torch.equal(*found)
