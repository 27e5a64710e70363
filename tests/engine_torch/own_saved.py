"""What ranks do to save and load a user's own module: modules whose every element is its own number, sharded by PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import Saver, load, save

Sharding = tuple[str, tuple[int, ...]]
"""The kind of sharding, and the sizes of its mesh."""


class Small(nn.Module):
    """Dims that few meshes divide, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 6)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.tokens(tokens))))


def numbered(made: Callable[[], nn.Module] = Small) -> Any:
    """Every element of every weight its own number."""
    module, first = made(), 0
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.arange(first, first + one.numel()).view(one.shape))
            first += one.numel()
    return module


def sharded(kind: str, sizes: tuple[int, ...], made: Callable[[], nn.Module] = Small) -> nn.Module:
    """A numbered module as a user shards it."""
    module = numbered(made)
    if kind == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "fsdp")[-len(sizes) :]))
    elif kind == "fsdp-tp":
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "fsdp", "tp")[-len(sizes) :])
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert mesh.mesh_dim_names is not None
        fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]])
    elif kind == "tp":
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("tp",))
        parallelize_module(
            module, mesh, {"tokens": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        assert isinstance(module, Small)
        module.head.weight = module.tokens.weight
    else:
        assert kind == "replicated", kind
    return module


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer after a step without learning, whose moments are multiples of the weights."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for one in module.parameters():
        one.grad = one.detach().clone()
    optimizer.step()
    return optimizer


def local(one: Any) -> np.ndarray:
    one = one.detach()
    return (one.to_local() if isinstance(one, DTensor) else one).clone().numpy()


def locals_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Everything that a rank holds."""
    found = {name: local(one) for name, one in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found |= {f"{name} {key}": local(value) for key, value in optimizer.state[parameter].items()}
    return found


def cleared(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for one in module.state_dict().values():
            one.zero_()
    return module


def save_small(kind: str, sizes: tuple[int, ...], folder: str, step: int = 1) -> None:
    module = sharded(kind, sizes)
    save(folder, module, stepped(module), step=step, values={"next_row": 8})


def save_small_in_background(kind: str, sizes: tuple[int, ...], folder: str) -> None:
    """As ``save_small``; the module and its optimizer are changed while they are written."""
    module = sharded(kind, sizes)
    optimizer = stepped(module)
    with Saver(folder) as saver:
        saver.save(module, optimizer, step=1, values={"next_row": 8})
        cleared(module)
        for kept in optimizer.state.values():
            for one in kept.values():
                one.zero_()
        saver.check()


def load_small(kind: str, sizes: tuple[int, ...], folder: str) -> list[str]:
    """The names of what a rank does not hold, after a load, as PyTorch itself shards it."""
    right = sharded(kind, sizes)
    needed = locals_of(right, stepped(right))
    module = cleared(sharded(kind, sizes))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    loaded = load(folder, module, optimizer)
    assert (loaded.step, loaded.values, loaded.kept) == (1, {"next_row": 8}, ())
    assert optimizer.param_groups[0]["lr"] == 0.0
    found = locals_of(module, optimizer)
    assert found.keys() == needed.keys(), found.keys() ^ needed.keys()
    return [
        name
        for name, array in found.items()
        if array.dtype != needed[name].dtype
        or array.shape != needed[name].shape
        or not np.allclose(array, needed[name], rtol=1e-6)
    ]


def message(do: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The message of a refusal; empty where there is none."""
    try:
        do(*arguments, **named)
    except InputError as error:
        return str(error)
    return ""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_of(tensors: Mapping[str, torch.Tensor]) -> Any:
    """A module that has exactly these tensors."""
    module = nn.Module()
    for name, one in tensors.items():
        module.register_parameter(name, nn.Parameter(one, requires_grad=False))
    return module
