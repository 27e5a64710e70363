"""What ranks do with the modules of ``engine_torch.modules``: a small model on any mesh, trained, saved and loaded."""

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
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import load, save
from shardwright.engine_torch.modules import Linear
from shardwright.engine_torch.modules.parallel import ParallelModule

TOKENS, WIDTH, HIDDEN = 128, 128, 256
"""Of each of four data ranks, and of the weights: a rank of tp has a multiple of the largest block."""

MESHES: Mapping[str, Mapping[str, int]] = {
    "one": {},
    "fsdp": {"fsdp": 4},
    "hsdp": {"copies": 2, "fsdp": 2},
    "tp": {"fsdp": 2, "tp": 2},
    "tp-sp": {"fsdp": 2, "tp": 2},
}


Codes = tuple[np.ndarray, ...]
"""The bytes of codes and of scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model is: its meshes, and this rank's tokens."""

    mesh: DeviceMesh | None
    tp: DeviceMesh | None
    data: DeviceMesh | None
    weights: DeviceMesh | None
    amax: dist.ProcessGroup | None
    sequence_parallel: bool


def place(kind: str) -> Place:
    sizes = MESHES[kind]
    if not sizes:
        return Place(mesh=None, tp=None, data=None, weights=None, amax=None, sequence_parallel=False)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = mesh[tuple(axis for axis in sizes if axis != "tp")]
    return Place(
        mesh=mesh,
        tp=mesh["tp"] if "tp" in sizes else None,
        data=data,
        weights=None,
        amax=dist.group.WORLD,
        sequence_parallel=kind == "tp-sp",
    )


class Pair(nn.Module):
    """A column-parallel layer, a row-parallel one, and one that is neither, with sequence parallelism between them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = Linear(WIDTH, HIDDEN, parallel_mode="column", **options)
        self.down = Linear(HIDDEN, WIDTH, parallel_mode="row", **options)
        self.out = Linear(WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(nn.functional.gelu(self.up(x))))


MODELS: Mapping[str, Callable[..., nn.Module]] = {"pair": Pair}


def made(kind: str, model: str, recipe: str | None, *, deferred: bool = False) -> tuple[nn.Module, Place]:
    """A model on a mesh, in the order of calls that users follow."""
    torch.manual_seed(5)
    at = place(kind)
    module = MODELS[model](recipe=recipe, sequence_parallel=at.sequence_parallel, device="meta" if deferred else None)
    parallel = [one for one in module.modules() if isinstance(one, ParallelModule)]
    for one in parallel:
        one.set_device_mesh(at.tp, amax_group=at.amax)
    if at.data is not None:
        for one in module.children():
            fully_shard(one, mesh=at.data)
        fully_shard(module, mesh=at.data)
    if deferred:
        for one in parallel:
            one.reset_parameters(defer_init=False)
    return module, at


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(4 * TOKENS, WIDTH, generator=generator) for _ in range(2))  # pyright: ignore[reportReturnType]


def part(tokens: torch.Tensor, at: Place) -> torch.Tensor:
    """This rank's tokens: those of its data rank, of which sequence parallelism leaves it a shard."""
    for mesh, wanted in ((at.data, True), (at.tp, at.sequence_parallel)):
        if mesh is None or not wanted:
            continue
        here = mesh.get_coordinate()
        assert here is not None
        for index, size in zip(here, mesh.shape, strict=True):
            tokens = tokens.chunk(size)[index]
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step gave: this rank's output, and the entire gradients, with their norm."""

    output: np.ndarray
    gradients: Mapping[str, np.ndarray]
    norm: float


def entire(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def step(module: nn.Module, at: Place, number: int, optimizer: torch.optim.Optimizer | None = None) -> Step:
    inputs, targets = (part(one, at) for one in batch(number))
    output = module(inputs)
    # Ranks of sequence parallelism have other tokens, and the gradient is summed over tp: so it is for a mean over all of them.
    num = len(targets) * (at.tp.size() if at.tp is not None and at.sequence_parallel else 1)
    ((output - targets).square().sum() / num).backward()
    for name, one in module.named_parameters():
        assert one.grad is not None, name
        if isinstance(one, DTensor):
            assert isinstance(one.grad, DTensor), name
            assert one.grad.placements == one.placements, (name, one.grad.placements, one.placements)
    gradients = {name: entire(one.grad) for name, one in module.named_parameters() if one.grad is not None}
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    found = Step(
        output=output.detach().numpy().copy(),
        gradients=gradients,
        norm=float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
    )
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return found


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def values(module: nn.Module) -> Mapping[str, np.ndarray]:
    return {name: entire(one) for name, one in module.named_parameters()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``first``: the initial values. ``codes``: of each weight in the first step, as this rank multiplied them. ``steps``: also
    the one after the save. ``tp``: this rank's index over tp and the number of its ranks."""

    first: Mapping[str, np.ndarray]
    codes: Mapping[str, Codes]
    steps: Sequence[Step]
    data: tuple[int, ...]
    tp: tuple[int, int]


def trained(
    kind: str, model: str, recipe: str | None, folder: str = "", deferred: bool = False, num: int = 3
) -> Trained:
    """Some steps, a save by us and by DCP, and one step more."""
    module, at = made(kind, model, recipe, deferred=deferred)
    first = values(module)
    optimizer = adamw(module)
    codes: dict[str, Codes] = {}
    hooks = [
        one.register_forward_pre_hook(_recording(codes, name))
        for name, one in module.named_modules()
        if isinstance(one, ParallelModule)
    ]
    steps = [step(module, at, 0, optimizer)]
    for hook in hooks:
        hook.remove()
    steps += [step(module, at, number, optimizer) for number in range(1, num)]
    if folder:
        save(f"{folder}/ours", module, optimizer, step=num)
        if at.mesh is not None:
            weights, state = get_state_dict(module, optimizer)
            save_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
    steps.append(step(module, at, num, optimizer))
    return Trained(
        first=first,
        codes=codes,
        steps=steps,
        data=tuple(at.data.get_coordinate() or ()) if at.data is not None else (),
        tp=(at.tp.get_local_rank(), at.tp.size()) if at.tp is not None else (0, 1),
    )


def _recording(codes: dict[str, Codes], name: str) -> Callable[..., None]:
    def record(module: ParallelModule, _: object) -> None:
        for weight in module.linear_dims():
            found = module.quantized(weight)
            if found is not None:
                codes[f"{name}.{weight}"] = tuple(
                    one.contiguous().view(torch.uint8).numpy().copy() for one in found[:2]
                )

    return record


def resumed(kind: str, model: str, recipe: str | None, folder: str, num: int = 3) -> tuple[Step, Step | None]:
    """The step after a load, by us and by DCP."""
    module, at = made(kind, model, recipe, deferred=True)
    optimizer = adamw(module)
    assert load(f"{folder}/ours", module, optimizer).step == num
    ours = step(module, at, num, optimizer)
    if at.mesh is None:
        return ours, None
    module, at = made(kind, model, recipe, deferred=True)
    optimizer = adamw(module)
    weights, state = get_state_dict(module, optimizer)
    load_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    return ours, step(module, at, num, optimizer)


def refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except InputError as error:
        return str(error)
    return ""


def refusals() -> Mapping[str, str]:
    """What a rank is refused on a mesh of fsdp 2 x tp 2."""
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    rank = dist.get_rank()

    def sharded_before() -> None:
        layer = Linear(8, 8, parallel_mode="column")
        fully_shard(layer, mesh=mesh["fsdp"])
        layer.set_device_mesh(mesh["tp"])

    def never_placed() -> None:
        layer = Linear(8, 8, parallel_mode="column", tp_size=2)
        fully_shard(layer, mesh=mesh["fsdp"])
        layer.reset_parameters()

    def called_inside() -> None:
        model = nn.Sequential(Linear(8, 8, parallel_mode="column", tp_mesh=mesh["tp"]))
        fully_shard(model, mesh=mesh["fsdp"])
        model[0](torch.ones(2, 8))

    def other_seeds() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank % 2)
            Linear(8, 8, parallel_mode="column", tp_mesh=mesh["tp"])

    def other_recipes_at_rest() -> None:
        layer = Linear(8, 8, recipe="mxfp8" if rank < 2 else "fp8-row", tp_mesh=mesh["tp"], device="meta")
        fully_shard(layer, mesh=mesh["fsdp"])
        layer.reset_parameters()

    cases: Mapping[str, Callable[[], object]] = {
        "two dims": lambda: Linear(8, 8, parallel_mode="column", tp_mesh=mesh),
        "no mesh": lambda: Linear(8, 8).set_device_mesh("tp"),  # pyright: ignore[reportArgumentType]
        "dim": lambda: Linear(8, 9, parallel_mode="column", tp_mesh=mesh["tp"]),
        "block": lambda: Linear(128, 384, parallel_mode="column", recipe="fp8-block", tp_mesh=mesh["tp"]),
        "size": lambda: Linear(8, 8, parallel_mode="row", tp_size=4, tp_mesh=mesh["tp"]),
        "sharded before": sharded_before,
        "never placed": never_placed,
        "called inside": called_inside,
        "weights": lambda: Linear(8, 8, tp_mesh=mesh["tp"], weight_mesh=mesh["fsdp"]),
        "amax": lambda: Linear(8, 8, tp_mesh=mesh["tp"], amax_group=mesh.get_group("fsdp")),
        "recipes": lambda: Linear(64, 64, recipe="mxfp8" if rank % 2 else "fp8-row", tp_mesh=mesh["tp"]),
        "recipes at rest": other_recipes_at_rest,
        "seeds": other_seeds,
        "tokens": lambda: Linear(8, 8, True, parallel_mode="row", tp_mesh=mesh["tp"])(torch.ones(3, 4)),
    }
    return {what: refusal(do) for what, do in cases.items()}
