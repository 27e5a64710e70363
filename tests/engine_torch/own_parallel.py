"""Transformers as different people write them, drawn by a seed, and the steps that ranks train them under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import Request, load_layout, make_plan, table_of
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.own_program.module import parallelize, shapes_of
from tests.engine_torch.own_block import CPU

VOCAB, WIDTH, HEADS, HEAD, HIDDEN, ROWS, LENGTH, STEPS = 64, 32, 4, 8, 96, 8, 6, 2

MESHES: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "tp": ({"data": 1, "tensor": 4}, {"data": 2, "tensor": 2}),
    "fsdp-tp": ({"data": 1, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 1, "tensor": 2}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How someone writes a transformer, and under which mesh it runs."""

    layout: str
    mesh: Mapping[str, int]
    attention: str
    views: str
    feed_forward: str
    norm: str
    kv_heads: int
    bias: bool
    tied: bool
    last_norm: bool
    positions: str
    head_norm: bool
    recomputed: bool
    wrapped_inputs: bool


def drawn(seed: int) -> Program:
    random = Random(seed)
    layout = random.choice(list(MESHES))
    mesh = random.choice(MESHES[layout])
    return Program(
        layout=layout,
        mesh=mesh,
        attention=random.choice(["sdpa", "sdpa", "matmul", "fused weight", "MultiheadAttention"]),
        views=random.choice(["unflatten", "view", "free view"]),
        feed_forward=random.choice(["gelu", "gated", "fused", "sequential"]),
        norm=random.choice(["LayerNorm", "LayerNorm without bias", "RMSNorm", "own"]),
        kv_heads=random.choice([HEADS, max(2, mesh["tensor"])]),
        bias=random.choice([False, True]),
        tied=random.choice([False, True]),
        last_norm=random.choice([False, True]),
        positions=random.choice(["none", "learned", "rotary"]),
        head_norm=random.choice([False, True]),
        recomputed=random.choice([False, False, True]),
        wrapped_inputs=random.choice([False, False, True]),
    )


class OwnNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "RMSNorm": lambda width: nn.RMSNorm(width, eps=1e-5),
    "own": OwnNorm,
}


class Attention(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.sizes = (HEADS, program.kv_heads, program.kv_heads)
        if program.attention == "fused weight":
            self.sizes = (HEADS, HEADS, HEADS)
            self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD, bias=program.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, num * HEAD, bias=program.bias) for num in self.sizes)
        self.head_norm = nn.RMSNorm(HEAD, eps=1e-5) if program.head_norm else nn.Identity()
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=program.bias)
        self.angles: torch.Tensor
        angles = torch.arange(LENGTH)[:, None] / 7 ** torch.arange(HEAD // 2)
        self.register_buffer("angles", torch.cat((angles, angles), -1), persistent=False)

    def heads(self, x_BLF: torch.Tensor, num: int) -> torch.Tensor:
        if self.program.views == "unflatten":
            return x_BLF.unflatten(-1, (num, HEAD)).transpose(1, 2)
        shape = (num, HEAD) if self.program.views == "view" else (-1, HEAD)
        return x_BLF.view(*x_BLF.shape[:2], *shape).transpose(1, 2)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        if self.program.attention == "fused weight":
            features = self.qkv(x_BLM).chunk(3, -1)
            # A view of a chunk: it may lie apart in memory.
            features = [part.contiguous() for part in features]
        else:
            features = [project(x_BLM) for project in (self.q, self.k, self.v)]
        q_BHLD, k_BHLD, v_BHLD = (self.heads(part, num) for part, num in zip(features, self.sizes, strict=True))
        q_BHLD, k_BHLD = self.head_norm(q_BHLD), self.head_norm(k_BHLD)
        if self.program.positions == "rotary":
            q_BHLD, k_BHLD = self.turned(q_BHLD), self.turned(k_BHLD)
        if self.program.attention == "matmul":
            repeats = HEADS // self.sizes[1]
            k_BHLD, v_BHLD = (
                part[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for part in (k_BHLD, v_BHLD)
            )
            scores_BHLL = q_BHLD @ k_BHLD.transpose(-1, -2) / HEAD**0.5
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            attended_BHLD = scores_BHLL.masked_fill(hidden, float("-inf")).softmax(-1) @ v_BHLD
        else:
            attended_BHLD = functional.scaled_dot_product_attention(
                q_BHLD, k_BHLD, v_BHLD, is_causal=True, enable_gqa=self.sizes[1] < HEADS
            )
        attended_BLF = attended_BHLD.transpose(1, 2)
        return self.out(
            attended_BLF.flatten(2) if self.program.views == "unflatten" else attended_BLF.reshape(*x_BLM.shape[:2], -1)
        )

    def turned(self, x_BHLD: torch.Tensor) -> torch.Tensor:
        first, second = x_BHLD.chunk(2, -1)
        return x_BHLD * self.angles.cos() + torch.cat((-second, first), -1) * self.angles.sin()


class Fused(nn.Module):
    """With its attention of PyTorch."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=program.bias, batch_first=program.views != "view")

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        x = x_BLM if self.attention.batch_first else x_BLM.transpose(0, 1)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        attended, weights = self.attention(x, x, x, attn_mask=hidden, need_weights=self.attention.batch_first)
        if weights is not None:
            attended = attended + 0.1 * weights.mean()
        return attended if self.attention.batch_first else attended.transpose(0, 1)


class FeedForward(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.kind = program.feed_forward
        self.up = nn.Linear(WIDTH, HIDDEN * (2 if self.kind == "fused" else 1), bias=program.bias)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=program.bias) if self.kind == "gated" else None
        self.down = nn.Linear(HIDDEN, WIDTH, bias=program.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "fused":
            first, second = self.up(x).chunk(2, -1)
            return self.down(functional.silu(first) * second)
        hidden = functional.gelu(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))


class Block(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.first_norm, self.second_norm = (NORMS[program.norm](WIDTH) for _ in range(2))
        self.attention = Fused(program) if program.attention == "MultiheadAttention" else Attention(program)
        if program.feed_forward == "sequential":
            up, down = (nn.Linear(*sizes, bias=program.bias) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
            self.mlp = nn.Sequential()
            for name, part in (("up", up), ("relu", nn.ReLU()), ("down", down)):
                self.mlp.add_module(name, part)
        else:
            self.mlp = FeedForward(program)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.scale * self.mlp(self.second_norm(x))


class Transformer(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        if program.positions == "learned":
            self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.blocks = nn.ModuleList(Block(program) for _ in range(2))
        self.last_norm = NORMS[program.norm](WIDTH) if program.last_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if program.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.program.positions == "learned":
            x = x + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.program.recomputed else block(x)
        return self.head(self.last_norm(x)) / 2


NAMES = {
    "tokens.weight": "embedding: vocab embed",
    "positions": "embedding: _positions embed",
    "*.attention.q.weight": "attention: heads embed",
    "*.attention.q.bias": "attention: heads",
    "*.attention.k.weight": "attention: kv_heads embed",
    "*.attention.k.bias": "attention: kv_heads",
    "*.attention.v.weight": "attention: kv_heads embed",
    "*.attention.v.bias": "attention: kv_heads",
    "*.attention.qkv.weight": "attention: heads embed",
    "*.attention.qkv.bias": "attention: heads",
    "*.attention.out.weight": "attention: embed heads",
    "*.attention.out.bias": "attention: embed",
    "*.attention.head_norm.weight": "attention: head_dim",
    "*.in_proj_weight": "attention: heads embed",
    "*.in_proj_bias": "attention: heads",
    "*.out_proj.weight": "attention: embed heads",
    "*.out_proj.bias": "attention: embed",
    "*.up.weight": "mlp: mlp embed",
    "*.up.bias": "mlp: mlp",
    "*.gate.weight": "mlp: mlp embed",
    "*.gate.bias": "mlp: mlp",
    "*.down.weight": "mlp: embed mlp",
    "*.down.bias": "mlp: embed",
    "*_norm.weight": "residual: norm",
    "*_norm.bias": "residual: norm",
    "*.scale": "residual: norm",
    "head.weight": "logits: vocab embed",
}


def module_of(program: Program) -> Transformer:
    torch.manual_seed(11)
    return Transformer(program)


def plan_of(program: Program) -> Plan:
    shapes = shapes_of(module_of(program))
    names: dict[str, str] = {}
    for name in shapes:
        pattern = next(
            pattern
            for pattern in NAMES
            if _fits(name, pattern) and not (pattern == "*_norm.weight" and name.endswith("head_norm.weight"))
        )
        names[name] = NAMES[pattern]
    axes = {text.split()[1] for text in names.values()} | {text.split()[-1] for text in names.values()}
    units = {axis: HEAD for axis in ("heads", "kv_heads") if axis in axes}
    table = table_of(shapes, names, units=units)
    return make_plan(
        Request(
            layout=load_layout(program.layout),
            table=table,
            mesh_sizes=program.mesh,
            batch=ROWS,
            length=LENGTH,
            engine="torch",
        )
    )


def _fits(name: str, pattern: str) -> bool:
    return name.endswith(pattern.removeprefix("*")) if pattern.startswith("*") else name == pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The mean loss of each step over all rows, and the entire weights after the last one, with the gradients of the first."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Any]
    weights: Mapping[str, Any]


def train(program: Program, plan: Plan | None) -> Trained:
    """Steps of SGD. ``plan`` None: in one process."""
    module = module_of(program)
    mesh = parallelize(module, plan, device=CPU) if plan is not None else None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    losses, gradients = [], {}
    for _ in range(STEPS):
        rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        if mesh is not None:
            rows = rows.chunk(dist.get_world_size(mesh.get_group("batch")))[mesh.get_local_rank("batch")]
        tokens = rows[:, :-1]
        if mesh is not None and program.wrapped_inputs:
            tokens = DTensor.from_local(tokens, mesh["tensor"], [Replicate()], run_check=False)
        logits = module(tokens)
        assert isinstance(logits, DTensor) == isinstance(tokens, DTensor)
        loss = functional.cross_entropy(entire(logits).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if not gradients:
            gradients = {
                name: entire(weight.grad).numpy().copy()
                for name, weight in module.named_parameters()
                if weight.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    weights = {name: entire(weight.detach()).numpy().copy() for name, weight in module.named_parameters()}
    return Trained(losses=tuple(losses), gradients=gradients, weights=weights)


def entire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Local(nn.Module):
    """Someone's own attention, with each rank's shard as a plain tensor, and an error on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ArithmeticError
        hidden = self.up(x)
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        return self.down(hidden.relu())


def local_module() -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(Local(), Local())


def local_plan(layout: str, mesh: Mapping[str, int]) -> Plan:
    names = {"*.up.weight": "mlp: mlp embed", "*.down.weight": "mlp: embed mlp"}
    table = table_of(shapes_of(local_module()), names)
    return make_plan(
        Request(layout=load_layout(layout), table=table, mesh_sizes=mesh, batch=4, length=4, engine="torch")
    )


def surroundings(plan: Plan) -> tuple[float, float, bool, bool]:
    """How far outputs are from those of one process, also of a copy; and, after an error, whether the weights are DTensors again, and
    whether PyTorch itself computes again outside of the module."""
    module, alone = local_module(), local_module()
    parallelize(module, plan, device=CPU)
    x = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    errors = [float((copy(x) - alone(x)).detach().abs().max()) for copy in (module, deepcopy(module))]
    with suppress(ArithmeticError):
        module[0](x, fails=True)
    weight = module[0].get_submodule("up").get_parameter("weight")
    try:
        torch.mv(weight, x[0, 0])
    except RuntimeError as error:
        outside = "mixed torch.Tensor and DTensor" in str(error)
    else:
        outside = False
    return errors[0], errors[1], isinstance(weight, DTensor), outside


def called_alone(plan: Plan) -> str:
    """The message for a module that is called without the unit that gathers its weights."""
    module = local_module()
    parallelize(module, plan, device=CPU)
    try:
        module[0].get_submodule("up")(torch.zeros(4, WIDTH))
    except InputError as error:
        return str(error)
    return ""
