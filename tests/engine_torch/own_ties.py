"""What ranks do with modules of seeds of their own, with modules that share weights, and with meshes of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional

from shardwright.core.recipes.presets import preset
from shardwright.engine_torch import clip_grad_norm_
from shardwright.engine_torch.modules import Embedding, LayerNormMLP, Linear, RMSNorm
from tests.engine_torch.own_modules import entire
from tests.engine_torch.refused_modules import refusal

WIDTH, ENTRIES = 32, 64


def initial(seed: int, device: str) -> dict[str, list[float]]:
    """The values of modules on (data, tp) where each rank has drawn a seed of its own; alone, those of ``seed``."""
    num = dist.get_world_size()
    torch.manual_seed(seed + dist.get_rank())
    module = nn.Sequential(
        LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", set_parallel_mode=True, device=device),
        Linear(WIDTH, WIDTH, parallel_mode="row", recipe="nvfp4", init_method=nn.init.xavier_uniform_, device=device),
    )
    if num > 1:
        mesh = init_device_mesh("cpu", (num // 2, 2), mesh_dim_names=("data", "model"))
        for child in module:
            child.set_device_mesh(mesh["model"], mesh)  # pyright: ignore[reportCallIssue]
        # With values, ranks of data have those of their own seeds.
        fully_shard(module, mesh=mesh["data"])
    if device == "meta":
        for child in module:
            child.reset_parameters()  # pyright: ignore[reportCallIssue]
    tensors = {**dict(module.named_parameters()), "seed": module[1].random.seed}  # pyright: ignore[reportAttributeAccessIssue]
    return {name: entire(tensor).flatten().tolist() for name, tensor in tensors.items()}


def changed_since() -> str:
    torch.manual_seed(dist.get_rank())
    layer = Linear(8, 8, parallel_mode="column")
    with torch.no_grad():
        layer.bias.fill_(dist.get_rank())  # pyright: ignore[reportOptionalMemberAccess]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return refusal(lambda: layer.set_device_mesh(mesh["model"]))


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["model"]
    torch.manual_seed(0)
    layer, tokens = Linear(8, 8, parallel_mode="column", tp_mesh=mesh), Embedding(8, 8)
    tied = Linear(8, 8, bias=False, parallel_mode="column")
    tied.weight = tokens.weight
    tokens.set_device_mesh(mesh)
    return [
        refusal(lambda: layer(DTensor.from_local(torch.ones(2, 8), mesh, [Replicate()]))),
        refusal(lambda: tokens(DTensor.from_local(torch.ones(2, dtype=torch.int64), mesh, [Shard(0)]))),
        refusal(lambda: tied(torch.ones(2, 8))),
        refusal(lambda: Embedding(50_257, 8, vocab_parallel=True, tp_mesh=mesh)),
    ]


def tied(width_of_tp: int, ours: bool, first: str) -> list[float]:
    """Losses of a decoder whose head shares the weight of an embedding, ours or PyTorch's: on meta, with an optimizer that is made before
    there are values, and values that ``first`` gives, "head" or "embedding"."""
    torch.manual_seed(0)
    num = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num // width_of_tp, width_of_tp), mesh_dim_names=("data", "model"))
    tp = mesh["model"]
    embedding = (
        Embedding(ENTRIES, WIDTH, vocab_parallel=True, device="meta")
        if ours
        else nn.Embedding(ENTRIES, WIDTH, device="meta")
    )
    model = nn.Sequential(
        embedding,
        RMSNorm(WIDTH, device="meta"),
        Linear(
            WIDTH,
            ENTRIES,
            bias=False,
            parallel_mode="column",
            recipe=preset("mxfp8"),
            tp_size=width_of_tp,
            device="meta",
        ),
    )
    if isinstance(embedding, Embedding):
        embedding.set_device_mesh(tp)
    else:
        parallelize_module(model, tp, {"0": RowwiseParallel(input_layouts=Replicate())})
    model[1].set_device_mesh(tp)  # pyright: ignore[reportCallIssue]
    model[2].weight = embedding.weight
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = (2, 1, 0) if first == "head" or not ours else (0, 1, 2)
    for number in order:
        if number or ours:
            model[number].reset_parameters()  # pyright: ignore[reportCallIssue]
    assert model[2].weight is embedding.weight
    assert len(list(model.parameters())) == 2
    tokens = (
        (torch.arange(4 * 9).view(4, 9) * 7)
        .remainder(ENTRIES)
        .chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    )
    losses = []
    for _ in range(3):
        logits = DTensor.from_local(model(tokens[:, :-1]), tp, [Shard(-1)]).full_tensor()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / num)
    return losses
