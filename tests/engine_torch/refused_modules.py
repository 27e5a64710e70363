"""What ranks are refused of the modules of ``engine_torch.modules``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch.modules import Linear


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
    other = [dist.new_group([1, 2, 3]), dist.new_group([0])][rank != 0]

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

    def other_recipes_at_rest() -> None:
        layer = Linear(8, 8, recipe="mxfp8" if rank < 2 else "fp8-row", tp_mesh=mesh["tp"], device="meta")
        fully_shard(layer, mesh=mesh["fsdp"])
        layer.reset_parameters()

    cases: Mapping[str, Callable[[], object]] = {
        "two dims": lambda: Linear(8, 8, parallel_mode="column", tp_mesh=mesh),
        "no order": lambda: Linear(8, 8, tp_mesh=DeviceMesh("cpu", torch.tensor([2, 0, 1, 3]), mesh_dim_names=("tp",))),
        "no mesh": lambda: Linear(8, 8).set_device_mesh("tp"),  # pyright: ignore[reportArgumentType]
        "dim": lambda: Linear(8, 9, parallel_mode="column", tp_mesh=mesh["tp"]),
        "block": lambda: Linear(128, 384, parallel_mode="column", recipe="fp8-block", tp_mesh=mesh["tp"]),
        "size": lambda: Linear(8, 8, parallel_mode="row", tp_size=4, tp_mesh=mesh["tp"]),
        "sharded before": sharded_before,
        "never placed": never_placed,
        "called inside": called_inside,
        "weights": lambda: Linear(8, 8, tp_mesh=mesh["tp"], weight_mesh=mesh["fsdp"]),
        "amax": lambda: Linear(8, 8, tp_mesh=mesh["tp"], amax_group=mesh.get_group("fsdp")),
        "no member": lambda: Linear(8, 8, amax_group=other),
        "recipes": lambda: Linear(64, 64, recipe="mxfp8" if rank % 2 else "fp8-row", tp_mesh=mesh["tp"]),
        "recipes of one name": lambda: Linear(
            64, 64, recipe=replace(preset("fp8-current"), reduce_amax=rank % 2 == 0), tp_mesh=mesh["tp"]
        ),
        "recipes at rest": other_recipes_at_rest,
        "tokens": lambda: Linear(8, 8, True, parallel_mode="row", tp_mesh=mesh["tp"])(torch.ones(3, 4)),
    }
    return {what: refusal(do) for what, do in cases.items()}
