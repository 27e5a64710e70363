"""What ranks do with the modules of ``engine_torch.modules``: a small model on any mesh, trained, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwright.core.recipes.presets import preset
from shardwright.engine_torch import load, save
from shardwright.engine_torch.io.private import sum_gradients
from shardwright.engine_torch.modules import (
    DotProductAttention,
    Embedding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    update_scales,
)
from shardwright.engine_torch.modules.products import ProductModule

TOKENS, WIDTH, HIDDEN, VOCAB = 128, 128, 256, 256
"""Of each of four data ranks, and of the weights: a rank of tp has a multiple of the largest block."""

POWER_OF_TWO = "fp8-current-2"
"""fp8-current with scales that are powers of two."""

DELAYED = "fp8-delayed"

NVFP4, WITHOUT_CHANCE = "nvfp4", "nvfp4-nearest"
"""nvfp4 without stochastic rounding and Hadamard transforms."""

WITH_OPTIONS = {
    POWER_OF_TWO: preset("fp8-current", use_power_2_scales=True),
    WITHOUT_CHANCE: preset("nvfp4", disable_rht=True, disable_stochastic_rounding=True),
}

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


class Attention(nn.Module):
    """With fewer KV heads than heads; values are the keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, zero_centered_gamma=True, **{**options, "recipe": None})
        self.q = Linear(WIDTH, 2 * WIDTH, parallel_mode="column", **options)
        self.k = LayerNormLinear(WIDTH, 2 * WIDTH, parallel_mode="column", bias=False, **options)
        self.out = Linear(2 * WIDTH, WIDTH, parallel_mode="row", **options)
        self.product = DotProductAttention(16, WIDTH // 8, 16, qkv_format="bshd")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (made.unflatten(-1, (-1, WIDTH // 8)) for made in (self.q(self.norm(x)), self.k(x)))
        return x + self.out(self.product(q, k, k))


class Decoder(nn.Module):
    """Of tied embedding and head, with a gated MLP."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        high = {**options, "recipe": None}
        self.tokens = Embedding(VOCAB, WIDTH, vocab_parallel=True, **high)
        self.attention = Attention(**options)
        self.mlp = LayerNormMLP(
            WIDTH, HIDDEN, normalization="RMSNorm", activation="swiglu", set_parallel_mode=True, **options
        )
        self.norm = LayerNorm(WIDTH, **high)
        self.head = Linear(WIDTH, VOCAB, parallel_mode="column", bias=False, **options)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.tokens(tokens))
        return self.head(self.norm(x + self.mlp(x)))


class Layered(nn.Module):
    """Of one layer of a transformer, with fewer KV heads than heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        high = {**options, "recipe": None}
        self.tokens = Embedding(VOCAB, WIDTH, vocab_parallel=True, **high)
        self.layer = TransformerLayer(
            WIDTH,
            HIDDEN,
            16,
            8,
            kv_channels=32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            set_parallel_mode=True,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            qk_norm_type="RMSNorm",
            bias=True,
            **options,
        )
        self.head = Linear(WIDTH, VOCAB, parallel_mode="column", bias=False, **options)
        self.head.weight = self.tokens.weight
        self.positions = RotaryPositionEmbedding(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(tokens), rotary_pos_emb=self.positions(tokens.shape[1])))


class Grouped(nn.Module):
    """Two layers of which each has tokens, and one in their middle that has none."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options["sequence_parallel"] = False
        self.norm = LayerNormLinear(WIDTH, WIDTH, **options)
        self.up = GroupedLinear(3, WIDTH, HIDDEN, parallel_mode="column", **options)
        self.down = GroupedLinear(3, HIDDEN, WIDTH, parallel_mode="row", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = (x[:, 0] > 0).int() * 2
        order = layer.argsort(stable=True)
        splits = layer.bincount(minlength=3).tolist()
        made = self.down(functional.relu(self.up(self.norm(x)[order], splits)), splits)
        return made[order.argsort()]


MODELS: Mapping[str, Callable[..., nn.Module]] = {"pair": Pair, "decoder": Decoder, "grouped": Grouped}

LAYERED = "layered"
OF_TOKENS = ("decoder", LAYERED)
"""Models whose input is numbers of tokens, and whose output is logits of a sharded vocabulary."""


def outermost(module: nn.Module) -> Iterator[Any]:
    """The modules that users place: those that are not parts of another one."""
    for child in module.children():
        if hasattr(child, "set_device_mesh"):
            yield child
        else:
            yield from outermost(child)


def made(kind: str, model: str, recipe: str | None, *, deferred: bool = False) -> tuple[nn.Module, Place]:
    """A model on a mesh, in the order of calls that users follow."""
    torch.manual_seed(5)
    at = place(kind)
    chosen = WITH_OPTIONS.get(recipe, recipe) if recipe else None
    module = {**MODELS, LAYERED: Layered}[model](
        recipe=chosen, sequence_parallel=at.sequence_parallel, device="meta" if deferred else None
    )
    parallel = list(outermost(module))
    for one in parallel:
        one.set_device_mesh(at.tp, amax_group=at.amax)
    if at.data is not None:
        for name, one in module.named_children():
            # Of tied weights, both users are in one unit.
            if name not in ("tokens", "head"):
                fully_shard(one, mesh=at.data)
        fully_shard(module, mesh=at.data)
        if recipe == DELAYED:
            # Cotangents must not depend on the mesh: scales are those of the steps before, which may have had another one.
            for one in module.modules():
                if isinstance(one, FSDPModule):
                    sum_gradients(one)
    if deferred:
        for one in parallel:
            one.reset_parameters(defer_init=False)
    return module, at


def batch(model: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    if model in OF_TOKENS:
        inputs = torch.randint(VOCAB, (4, TOKENS), generator=generator)
        return inputs, torch.randn(4, TOKENS, VOCAB, generator=generator)
    inputs, targets = (torch.randn(4 * TOKENS, WIDTH, generator=generator) for _ in range(2))
    return inputs, targets


def parts(model: str, at: Place, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This rank's inputs and targets, and the tokens that the loss is a mean over."""
    inputs, targets = (_rows(one, at.data) for one in batch(model, step))
    num = targets.shape[:-1].numel()
    if model == "pair" and at.sequence_parallel:
        inputs, targets = (_rows(one, at.tp) for one in (inputs, targets))
    if model in OF_TOKENS and at.tp is not None:
        targets = targets.chunk(at.tp.size(), dim=-1)[at.tp.get_local_rank()]
    return inputs, targets, num


def _rows(tokens: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    here = mesh.get_coordinate() if mesh is not None else ()
    assert here is not None
    for index, size in zip(here, mesh.shape if mesh is not None else (), strict=True):
        tokens = tokens.chunk(size)[index]
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step gave: this rank's output, and the entire gradients, with their norm. ``scales``: what was kept of delayed amaxes
    before it."""

    output: np.ndarray
    gradients: Mapping[str, np.ndarray]
    norm: float
    scales: Mapping[str, np.ndarray]


def entire(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def step(module: nn.Module, model: str, at: Place, number: int, optimizer: torch.optim.Optimizer | None = None) -> Step:
    inputs, targets, num = parts(model, at, number)
    scales = {name: entire(one) for name, one in module.state_dict().items() if ".delayed." in name}
    if scales and at.data is not None:
        num *= at.data.size()
    output = module(inputs)
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
        scales=scales,
    )
    update_scales(module)
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
    kind: str, model: str, recipe: str | None, folder: str = "", deferred: bool = False, num: int = 2
) -> Trained:
    """Some steps, a save by us and by DCP, and one step more."""
    module, at = made(kind, model, recipe, deferred=deferred)
    first = values(module)
    optimizer = adamw(module)
    codes: dict[str, Codes] = {}
    hooks = [
        one.register_forward_pre_hook(_recording(codes, name))
        for name, one in module.named_modules()
        if isinstance(one, ProductModule)
    ]
    steps = [step(module, model, at, 0, optimizer)]
    for hook in hooks:
        hook.remove()
    steps += [step(module, model, at, number, optimizer) for number in range(1, num)]
    if folder:
        save(f"{folder}/ours", module, optimizer, step=num)
        if at.mesh is not None:
            weights, state = get_state_dict(module, optimizer)
            save_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
    steps.append(step(module, model, at, num, optimizer))
    return Trained(
        first=first,
        codes=codes,
        steps=steps,
        data=tuple(at.data.get_coordinate() or ()) if at.data is not None else (),
        tp=(at.tp.get_local_rank(), at.tp.size()) if at.tp is not None else (0, 1),
    )


def _recording(codes: dict[str, Codes], name: str) -> Callable[..., None]:
    def record(module: ProductModule, _: object) -> None:
        for weight in module.linear_dims():
            found = module.quantized(weight)
            if found is not None:
                codes[f"{name}.{weight}"] = tuple(
                    one.contiguous().view(torch.uint8).numpy().copy() for one in found[:2]
                )

    return record


def resumed(kind: str, model: str, recipe: str | None, folder: str, num: int = 2) -> tuple[Step, Step | None]:
    """The step after a load, by us and by DCP."""
    module, at = made(kind, model, recipe, deferred=True)
    optimizer = adamw(module)
    assert load(f"{folder}/ours", module, optimizer).step == num
    ours = step(module, model, at, num, optimizer)
    if at.mesh is None:
        return ours, None
    module, at = made(kind, model, recipe, deferred=True)
    optimizer = adamw(module)
    weights, state = get_state_dict(module, optimizer)
    load_by_dcp({"model": weights, "optim": state}, checkpoint_id=f"{folder}/dcp")
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    return ours, step(module, model, at, num, optimizer)
