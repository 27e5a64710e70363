"""What ranks do with modules whose weights rest as codes: beside the same in high precision, saved, and loaded on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from shardwright.checkpoint import CheckpointError
from shardwright.engine_torch import load, save
from shardwright.engine_torch.modules import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    keep_main_weights,
    update_scales,
)
from shardwright.engine_torch.modules.parallel import ParallelModule
from tests.engine_torch.own_modules import WITH_OPTIONS
from tests.engine_torch.own_saved import message

TOKENS = 32
ARRAYS = ("_codes", "_scales", "_scale_of_tensor")

MESHES: Mapping[str, Mapping[str, int]] = {
    "one": {},
    "fsdp": {"data": 4},
    "tp": {"data": 2, "model": 2},
    "hsdp": {"copies": 2, "data": 2},
    "all": {"shard": 2, "left": 2, "right": 2},
}
"""The last one has replicas along an axis that is called as others call that of shards."""
TP = ("model", "right")
DOORS = ("ours", "dcp")
"""A save and a load by ``shardwright.engine_torch``, and by ``torch.distributed.checkpoint``."""


class Layers(nn.Module):
    """Each module that multiplies: column-parallel, row-parallel and replicated."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.norm = LayerNormLinear(width, width, parallel_mode="column", bias=False, **options)
        self.down = Linear(width, width, parallel_mode="row", **options)
        self.mlp = LayerNormMLP(
            width, width, normalization="RMSNorm", activation="swiglu", set_parallel_mode=True, **options
        )
        self.out = Linear(width, width, **options)
        self.experts = GroupedLinear(2, width, width, parallel_mode="column", bias=False, **options)
        self.joined = GroupedLinear(2, width, width, parallel_mode="row", bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(functional.gelu(self.norm(x)))
        x = self.out(x + self.mlp(x))
        splits = [TOKENS // 4, len(x) - TOKENS // 4]
        return x + self.joined(functional.relu(self.experts(x, splits)), splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    data: DeviceMesh | None
    tp: DeviceMesh | None
    weights: DeviceMesh | None
    tokens_of: int


def place(kind: str) -> Place:
    sizes = MESHES[kind]
    if not sizes:
        return Place(data=None, tp=None, weights=None, tokens_of=0)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = mesh[tuple(axis for axis in sizes if axis not in TP)]
    tp = next((mesh[axis] for axis in sizes if axis in TP), None)
    number = 0
    for index, size in zip(data.get_coordinate() or (), data.shape, strict=True):
        number = number * size + index
    weights = mesh["left", "right"] if kind == "all" else None
    return Place(data=data, tp=tp, weights=weights, tokens_of=number)


def width_of(recipe: str) -> int:
    """Of blocks of 128 each of four ranks has one."""
    return 512 if recipe == "fp8-block" else 128


def built(kind: str, recipe: str, *, codes: bool = True, width: int | None = None) -> tuple[nn.Module, Place]:
    """A model on a mesh, in the order of calls that users follow."""
    torch.manual_seed(5)
    at = place(kind)
    options: dict[str, Any] = {"recipe": WITH_OPTIONS.get(recipe, recipe), "device": "meta"}
    module = Layers(width or width_of(recipe), **options, **({"primary_weights": "codes"} if codes else {}))
    parallel = [part for part in module.modules() if isinstance(part, ParallelModule)]
    for part in parallel:
        if at.tp is not None:
            part.set_device_mesh(at.tp, at.weights, amax_group=dist.group.WORLD if recipe == "fp8-delayed" else None)
    if at.data is not None:
        for part in parallel:
            fully_shard(part, mesh=at.data)
        fully_shard(module, mesh=at.data)
    for part in parallel:
        part.reset_parameters(defer_init=False)
    return module, at


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def tokens(number: int, source: int, width: int) -> torch.Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(1000 * number + source))


def with_main_weights(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    keep_main_weights(module, optimizer)
    return module


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and this rank's gradients."""
    y = module(x)
    y.square().mean().backward()
    tensors = [
        y.detach().clone(),
        *(_local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None),
    ]
    assert len(tensors) == 1 + len(list(module.parameters()))
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    update_scales(module)
    optimizer.step()
    optimizer.zero_grad()
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(kind: str, recipe: str, folder: str, num: int) -> tuple[list[str], np.ndarray]:
    """What differs from modules that are gathered in high precision and quantized after, with the same main weights; and the output of the
    step after ``num`` steps, for the same tokens on all ranks. Codes after ``reset_parameters`` are saved as step 1, all as step 2."""
    wrong: list[str] = []
    module, at = built(kind, recipe)
    width = width_of(recipe)
    save(f"{folder}/first", module, step=1)
    optimizer = adamw(module)
    with_main_weights(module, optimizer)
    other, _ = built(kind, recipe, codes=False)
    other.load_state_dict(module.state_dict())
    # Values of codes may have other codes, where scales are no powers of two.
    module.load_state_dict({name: tensor for name, tensor in module.state_dict().items() if "resting." not in name})
    beside = adamw(other)
    for number in range(num):
        x = tokens(number, at.tokens_of, width)
        pairs = zip(stepped(module, optimizer, x), stepped(other, beside, x), strict=True)
        wrong += [f"step {number}, tensor {index}" for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    save(f"{folder}/ours", module, optimizer, step=2)
    weights, state = get_state_dict(module, optimizer)
    save_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
    return wrong, stepped(module, optimizer, tokens(num, 0, width))[0].numpy()


def resumed(kind: str, recipe: str, folder: str, num: int) -> list[np.ndarray]:
    """The output of the step after a load through each door; what each has loaded is saved again."""
    outputs = []
    for door in DOORS:
        module, _ = built(kind, recipe)
        optimizer = adamw(module)
        with_main_weights(module, optimizer)
        if door == "ours":
            assert load(f"{folder}/ours", module, optimizer).step == 2
        else:
            weights, state = get_state_dict(module, optimizer)
            load_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
            set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
        save(f"{folder}/{door} on {kind}", module, optimizer, step=2)
        outputs.append(stepped(module, optimizer, tokens(num, 0, width_of(recipe)))[0].numpy())
    return outputs


def first_codes(recipe: str, folder: str) -> None:
    """One process's codes of the initial values."""
    save(f"{folder}/alone", built("one", recipe)[0], step=1)


def refusals_on_ranks(folder: str) -> Mapping[str, str]:
    """What four ranks are told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "data"))
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    refused: dict[str, str] = {}

    def linear(outputs: int, mesh: DeviceMesh, **options: Any) -> Linear:
        torch.manual_seed(1)
        layer = Linear(128, outputs, bias=False, recipe="mxfp8", primary_weights="codes", device="meta")
        layer.set_device_mesh(weight_mesh=options.pop("weight_mesh", None))
        fully_shard(layer, mesh=mesh, **options)
        return layer

    refused["blocks"] = message(linear(64, world).reset_parameters)
    refused["weight_mesh"] = message(linear(128, mesh, weight_mesh=world).reset_parameters)
    refused["dim 1"] = message(linear(128, world, shard_placement_fn=lambda _: Shard(1)).reset_parameters)
    layer = linear(128, mesh)
    layer.reset_parameters()
    if dist.get_rank() == 3:
        codes = layer.state_dict()["resting.weight_codes"].to_local().view(torch.uint8)
        codes[0, 0] ^= 1
    try:
        save(f"{folder}/unequal", layer, step=1)
    except CheckpointError as error:
        refused["replicas"] = str(error)
    torch.manual_seed(1)
    head = Linear(128, 128, bias=False, recipe="mxfp8", primary_weights="codes")
    tied = nn.Sequential(nn.Embedding(128, 128), head)
    tied[0].weight = head.weight
    fully_shard(tied, mesh=world)
    head.reset_parameters()
    refused["tied"] = message(tied, torch.zeros(2, 4, dtype=torch.int64))
    return refused


def scales_of_experts() -> list[float]:
    """The scale of an expert's weight on each of four ranks, of which every two have experts of their own; and one after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "shards"))
    torch.manual_seed(1)
    largest = 1.0 + mesh["experts"].get_local_rank()
    options: dict[str, Any] = {"recipe": "fp8-current", "primary_weights": "codes", "device": "meta"}
    experts = GroupedLinear(
        2, 32, 32, bias=False, init_method=lambda tensor: tensor.copy_(largest * torch.eye(32)), **options
    )
    fully_shard(experts, mesh=mesh["shards"])
    experts.reset_parameters()
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.0, weight_decay=0.0)
    keep_main_weights(experts, optimizer)
    scales = [float(_local(experts.state_dict()["resting.weight1_scales"]))]
    with torch.no_grad():
        # The largest element is on one rank of the two.
        elements = experts.state_dict()["weight1"].to_local()
        elements[-1, -1] *= 1 + mesh["shards"].get_local_rank()
    experts(torch.ones(4, 32), [2, 2]).sum().backward()
    return [*scales, float(_local(experts.state_dict()["resting.weight1_scales"]))]


class Matrices(nn.Sequential):
    """Layers that each read tokens of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        sums = [layer(x[..., : layer.in_features]).sum() for layer in self if isinstance(layer, Linear)]
        return torch.stack(sums).sum()


def trained_bytes(recipe: str, width: int, hidden: int, kv_width: int) -> tuple[list[int], int]:
    """Of a block of layers that ``fully_shard`` gathers together, the bytes of each all-gather in a forward and a backward pass, as the profiler
    has them; and the bytes of codes and scales that this rank has at rest."""
    torch.manual_seed(1)
    shapes = [
        (width, width),
        (width, kv_width),
        (width, kv_width),
        (width, width),
        (width, hidden),
        (width, hidden),
        (hidden, width),
    ]
    options: dict[str, Any] = {"bias": False, "recipe": recipe, "primary_weights": "codes", "device": "meta"}
    block = Matrices(*(Linear(*shape, **options) for shape in shapes))
    fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
    for layer in block:
        assert isinstance(layer, Linear)
        layer.reset_parameters()
    x = torch.randn(16, max(width, hidden))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        block(x).backward()
    events = profiled.events() or ()
    gathers = [event.input_shapes[0][0] for event in events if event.name == "c10d::_allgather_base_"]
    at_rest = sum(
        _local(tensor).nbytes for layer in block for name, tensor in layer.state_dict().items() if name.endswith(ARRAYS)
    )
    return gathers, at_rest


VIEWS: Mapping[str, Callable[[Any], object]] = {
    "a column": lambda weight: weight[:, 5].fill_(2),
    "columns": lambda weight: weight.narrow(1, 0, 3).zero_(),
    "turned": lambda weight: weight.t()[4].fill_(1),
    "a row of this rank": lambda weight: weight.to_local()[1].fill_(3),
    "rows of what detach gives": lambda weight: weight.detach().to_local()[2:4].mul_(3),
    "elements in one row": lambda weight: weight.detach().to_local().view(-1)[:9].neg_(),
}


def not_followed() -> list[str]:
    """The views of a sharded weight of which codes do not follow what is written."""
    wrong: list[str] = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers: list[Any] = []
    of_each: Sequence[Mapping[str, Any]] = ({"primary_weights": "codes"}, {})
    for options in of_each:
        torch.manual_seed(3)
        layer = Linear(128, 128, bias=False, recipe="fp8-row", device="meta", **options)
        fully_shard(layer, mesh=mesh)
        layer.reset_parameters()
        layers.append(with_main_weights(layer))
    x, kept = torch.ones(4, 128), [layer.weight[:, 7] for layer in layers]
    layers[1].load_state_dict(layers[0].state_dict())
    for name, write in {**VIEWS, "a view that was kept": None}.items():
        with torch.no_grad():
            before = layers[1](x)
            for layer, view in zip(layers, kept, strict=True):
                layer.reshard()
                write(layer.weight) if write is not None else view.mul_(3)
            codes, high = (layer(x) for layer in layers)
            for layer in layers:
                layer.reshard()
        if torch.equal(high, before) or not torch.equal(codes, high):
            wrong.append(name)
    return wrong
