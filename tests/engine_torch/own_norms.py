"""What ranks do with gradients on several meshes: their norm, beside that of all elements in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from shardwright.engine_torch import clip_grad_norm_, get_total_norm
from shardwright.engine_torch.modules import GroupedLinear, LayerNormMLP, keep_main_weights, quantized_model_init


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """What all ranks found, and one process; ``reductions``: how many collectives the first took."""

    ours: float
    needed: float
    most_apart: float
    reductions: int


def drawn(seed: int) -> Norms:
    """Weights on drawn meshes of eight ranks, with drawn placements; some have no gradient, some are plain, and some of each rank's own."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "data", "model"))
    experts = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicas", "experts"))
    meshes = [
        mesh,
        mesh["data"],
        mesh["data", "model"],
        mesh["model"],
        mesh["copies", "data"],
        experts,
        experts["experts"],
    ]
    norm_type = draw.choice([1.0, 2.0, 3.0, math.inf])
    weights: list[nn.Parameter] = []
    alone: list[nn.Parameter] = []
    for _ in range(draw.randint(1, 8)):
        shape = draw.choice([(8, 8), (5, 7), (1, 3), (16,)])
        values, gradient = torch.randn(shape), torch.randn(shape) * 10.0 ** draw.randint(-3, 3)
        at = draw.choice([None, *meshes])
        placements = [] if at is None else _placements(draw, at, len(shape))
        weight = nn.Parameter(values.clone() if at is None else distribute_tensor(values, at, placements))
        if draw.random() < 0.8:
            weight.grad = gradient.clone() if at is None else distribute_tensor(gradient, at, placements)
            other = nn.Parameter(values.clone())
            other.grad = gradient.clone()
            alone.append(other)
        weights.append(weight)
    group = experts.get_group("experts")
    of_ranks = _of_ranks(experts)
    weights.append(of_ranks[experts.get_local_rank("experts")])
    alone += [_copy(weight) for weight in of_ranks]
    apart = {group: weights[-1:]}
    total = get_total_norm(
        [weight.grad for weight in weights if weight.grad is not None],
        norm_type,
        apart={group: [_gradient(weights[-1])]},
    )
    counted: list[int] = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **options: (counted.append(1), reduce(*args, **options))[1]
    try:
        norm = clip_grad_norm_(weights, 1.5, norm_type, apart=apart)
    finally:
        dist.all_reduce = reduce
    assert torch.equal(total, norm)
    needed = nn.utils.clip_grad_norm_(alone, 1.5, norm_type)
    after = clip_grad_norm_(weights, math.inf, norm_type, apart=apart)
    clipped = nn.utils.get_total_norm([_gradient(weight) for weight in alone], norm_type)
    return Norms(
        ours=float(norm),
        needed=float(needed),
        most_apart=abs(float(after) / float(clipped) - 1) if clipped else 0.0,
        reductions=len(counted),
    )


def _placements(draw: random.Random, mesh: DeviceMesh, dims: int) -> Sequence[Placement]:
    return [draw.choice([Replicate(), *(Shard(dim) for dim in range(dims))]) for _ in range(mesh.ndim)]


def _of_ranks(experts: DeviceMesh) -> list[nn.Parameter]:
    """A weight of each rank of the experts' dim, of which this rank uses its own."""
    weights = [nn.Parameter(torch.randn(3, 4)) for _ in range(experts.size(1))]
    for weight in weights:
        weight.grad = torch.randn(3, 4)
    return weights


def _copy(weight: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(weight.detach().clone())
    copy.grad = _gradient(weight).clone()
    return copy


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


class _Mixed(nn.Module):
    """Modules on (data, model) and on (data) beside PyTorch's own on (data). ``recipe``: of weights that rest as its codes."""

    def __init__(self, model: DeviceMesh | None, recipe: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        with quantized_model_init(recipe=recipe):
            self.mlp = LayerNormMLP(
                16, 32, normalization="RMSNorm", activation="swiglu", set_parallel_mode=True, tp_mesh=model
            )
            self.experts = GroupedLinear(2, 16, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts(self.mlp(self.norm(x)), [3, len(x) - 3]))


def mixed(recipe: str | None = None) -> tuple[float, float, int]:
    """The norm of a model on four ranks before and after it is clipped, and how many of its weights rest as codes."""
    mesh = None
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    model = _Mixed(None if mesh is None else mesh["model"], recipe)
    if mesh is not None:
        fully_shard(model, mesh=mesh["data"])
    model.mlp.reset_parameters()
    model.experts.reset_parameters()
    keep_main_weights(model)
    model(torch.arange(8 * 16).view(8, 16).sin()).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    after = get_total_norm([_gradient(weight) for weight in model.parameters()])
    return float(norm), float(after), sum(name.endswith("_codes") for name in model.state_dict())
