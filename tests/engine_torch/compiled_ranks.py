"""What a compiled module and one that is not compute in two passes, in one process or on the ranks of tensor parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwright.engine_torch.io.private import COMPILES_WHOLE
from shardwright.engine_torch.modules import LayerNormMLP, Linear, keep_main_weights, update_scales
from shardwright.engine_torch.modules.parallel import ParallelModule


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


def resting_steps(
    module: nn.Module, run: Callable[..., torch.Tensor], tokens: Sequence[torch.Tensor], arguments: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Outputs, gradients and states of training steps of a module whose weights rest as codes; after the first nothing is compiled."""
    for part in module.modules():
        if isinstance(part, ParallelModule):
            part.reset_parameters(defer_init=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    keep_main_weights(module, optimizer)
    found = []
    for step, x in enumerate(tokens):
        leaf = x.clone().requires_grad_()
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            y = run(leaf, **arguments)
            y.pow(3).sum().backward()
        gradients = [tensor.grad.clone() for tensor in (leaf, *module.parameters()) if tensor.grad is not None]
        assert len(gradients) == 1 + len(list(module.parameters()))
        found += [y.detach(), *gradients]
        update_scales(module)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *module.state_dict().values()]


def differing(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of tensors with other bits."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Codes have no operation that compares them.
        return local.contiguous().view(-1).view(torch.uint8)

    pairs = enumerate(zip(ours, theirs, strict=True))
    return [number for number, pair in pairs if not torch.equal(*map(bits, pair))]


def on_fsdp(recipe: str, kind: str) -> list[str]:
    """What differs of a module that is compiled and given to ``fully_shard`` then, ``kind``: on a mesh of fsdp, tp or both.

    PyTorch's own ``nn.Linear`` is the measure of what ``fully_shard`` lets a compiler trace: its hooks are never traced.
    """
    tp = {"fsdp": 1}.get(kind, 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("data", "tp"))
    x = tokens_of(64, 256)
    wrong = []
    whole: Mapping[str, Callable[[nn.Module], Any]] = {
        "as it is": lambda module: module,
        "compiled": compiled,
        "its forward": compiled_forward,
    }
    found = {}
    with warnings.catch_warnings():
        # PyTorch's own, of what it traces.
        warnings.simplefilter("ignore")
        for way, compile_it in whole.items():
            if kind == "tp" and way == "its forward":
                continue
            torch.manual_seed(5)
            if kind == "fsdp":
                module = Linear(256, 256, recipe=recipe, primary_weights="codes")
            else:
                module = LayerNormMLP(256, 512, set_parallel_mode=True, recipe=recipe, primary_weights="codes")
            if tp > 1:
                module.set_device_mesh(mesh["tp"], amax_group=dist.group.WORLD)
            run = compile_it(module)
            if kind != "tp":
                assert isinstance(run, nn.Module)
                fully_shard(run, mesh=mesh["data"])
            found[way] = resting_steps(module, run, [x, x.roll(1)], {})
        plain = nn.Linear(4, 4)
        fully_shard(plain, mesh=mesh["data"])
        try:
            compiled(plain)(torch.ones(2, 4))
        except RuntimeError:
            pass
        else:
            wrong.append("fully_shard is traced from outside: say so in the documents")
    for way, tensors in found.items():
        wrong += [f"{way}: tensor {number}" for number in differing(tensors, found["as it is"])]
    return wrong


def compiled_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, fullgraph=COMPILES_WHOLE, backend="aot_eager")
    return module
