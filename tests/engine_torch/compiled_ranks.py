"""What a compiled module and one that is not compute in two passes, in one process or on the ranks of tensor parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwright.engine_torch.io.private import COMPILES_WHOLE
from shardwright.engine_torch.modules import LayerNormMLP, update_scales


def tokens_of(num: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(6)).to(dtype)


def compiled(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Traced, and not fused. Before PyTorch 2.13 what has a recipe is left as it is."""
    return torch.compile(module, fullgraph=COMPILES_WHOLE, backend="aot_eager")


def two_passes(
    module: nn.Module,
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    arguments: Mapping[str, Any],
    end: Callable[[nn.Module], object],
) -> list[torch.Tensor]:
    """Outputs and gradients of two steps, of which the second compiles nothing. ``end``: of each."""
    found = []
    for stance in ("default", "fail_on_recompile"):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.compiler.set_stance(stance):
            y = run(leaf, **arguments)
            y.float().pow(3).sum().backward()
        end(module)
        gradients = [one.grad for one in (leaf, *module.parameters())]
        assert None not in gradients
        found += [y.detach(), *(one.to_local() if isinstance(one, DTensor) else one for one in gradients)]
    return found


def states(module: nn.Module) -> list[torch.Tensor]:
    return [one.to_local() if isinstance(one, DTensor) else one for one in module.state_dict().values()]


def on_ranks(recipe: str | None, sequence_parallel: bool) -> bool:
    """Whether both are the same to the bit."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = tokens_of(32, 64)
    if sequence_parallel:
        x = x.chunk(2)[mesh.get_rank()]
    found = []
    for way in (compiled, lambda one: one):
        torch.manual_seed(5)
        module = LayerNormMLP(
            64, 96, activation="swiglu", set_parallel_mode=True, sequence_parallel=sequence_parallel, recipe=recipe
        )
        module.set_device_mesh(mesh["tp"], amax_group=dist.group.WORLD)
        run = way(module)
        with warnings.catch_warnings():
            # PyTorch's own, of what it traces.
            warnings.simplefilter("ignore")
            found.append([*two_passes(module, run, x, {}, update_scales), *states(module)])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
