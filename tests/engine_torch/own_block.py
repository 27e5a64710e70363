"""A transformer as a user might write it, and the steps that a rank trains it. No JAX is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import located
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.own_model import activation_spec, table_of
from shardwright.core.resolution.request import Request
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.own_program.module import parallelize, shapes_of

VOCAB, WIDTH, HEADS, HEAD, HIDDEN, EXPERTS = 64, 32, 4, 8, 96, 4
ROWS, LENGTH, STEPS = 8, 6, 3
# Names of 2.13, which deprecates the older ones.
GATHER = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
SCATTER = getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
CPU = torch.device("cpu")

NAMES = {
    "tokens.weight": "embedding: vocab embed",
    "blocks.*.q.weight": "attention: heads embed",
    "blocks.*.k.weight": "attention: heads embed",
    "blocks.*.v.weight": "attention: heads embed",
    "blocks.*.o.weight": "attention: embed heads",
    "blocks.*.up.weight": "mlp: mlp embed",
    "blocks.*.down.weight": "mlp: embed mlp",
    "*norm.weight": "residual: norm",
    "head.weight": "logits: vocab embed",
}
NAMES_WITH_EXPERTS = {
    "tokens.weight": "embedding: vocab embed",
    "*.router.weight": "router: scores embed",
    "*.experts.up": "moe: experts mlp embed",
    "*.experts.down": "moe: experts embed mlp",
    "*.heat": "router:",
}


NAMES_OF_KERNELS = {
    "tokens.weight": "embedding: vocab embed",
    "blocks.*.one.weight": "mlp: mlp embed _taps",
    "blocks.*.two.weight": "mlp: mlp embed _height _width",
    "blocks.*.three.weight": "mlp: mlp embed _depth _height _width",
    "blocks.*.bias": "mlp: mlp",
    "head.weight": "logits: vocab embed",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH, bias=False)
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.second_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        normed_BLM = self.first_norm(x_BLM)
        q_BHLD, k_BHLD, v_BHLD = (self.heads(one(normed_BLM)) for one in (self.q, self.k, self.v))
        probabilities_BHLL = (q_BHLD @ k_BHLD.transpose(-1, -2) / HEAD**0.5).softmax(dim=-1)
        x_BLM = x_BLM + self.o((probabilities_BHLL @ v_BHLD).transpose(1, 2).flatten(2))
        return x_BLM + self.down(functional.silu(self.up(self.second_norm(x_BLM))))

    @staticmethod
    def heads(x_BLF: torch.Tensor) -> torch.Tensor:
        return x_BLF.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLM = self.tokens(tokens_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return self.head(self.norm(x_BLM))


class Convolved(nn.Module):
    """Kernels of one, two and three dims over the tokens of a row, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Kernels() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BML = self.tokens(tokens_BL).transpose(1, 2)
        for block in self.blocks:
            x_BML = block(x_BML)
        return self.head(x_BML.transpose(1, 2))


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.three = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x_BML: torch.Tensor) -> torch.Tensor:
        x_BML = x_BML + functional.silu(self.one(x_BML))
        rows, _, length = x_BML.shape
        x_BML = x_BML + functional.silu(self.two(x_BML.reshape(rows, 8, 4, length))).reshape(x_BML.shape)
        return x_BML + functional.silu(self.three(x_BML.reshape(rows, 4, 2, 4, length))).reshape(x_BML.shape)


class Unnormed(Transformer):
    """Without a norm before the head: the gradients of its inputs and of all blocks meet in the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


class AlongRows(Transformer):
    """A module that shards the tokens of the last norm over ``tensor``: the norm's gradient is partial over it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_pre_hook(_shard_along_rows)


def _shard_along_rows(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.redistribute(placements=[Shard(1)]) if isinstance(one, DTensor) else one for one in inputs)


def plan_of(
    roles: Mapping[str, Any],
    sizes: Mapping[str, int],
    module: nn.Module | None = None,
    names: Mapping[str, str] = NAMES,
    rules: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """``roles`` and ``rules``: of the mesh axes, as in a layout file."""
    layout = read_layout(
        located({"name": "own", "mesh": dict(sizes), "roles": dict(roles), "rules": dict(rules or {})})
    )
    table = table_of(shapes_of(module or dense()), names, units={"heads": HEAD} if names is NAMES else None)
    request = {"batch": ROWS, "length": LENGTH, "engine": "torch", **options}
    return make_plan(Request(layout=layout, table=table, **request))


def dense() -> Transformer:
    """A module with the same values on every rank."""
    torch.manual_seed(7)
    return Transformer()


def unnormed() -> Unnormed:
    torch.manual_seed(7)
    return Unnormed()


def along_rows() -> AlongRows:
    torch.manual_seed(7)
    return AlongRows()


def convolved() -> Convolved:
    torch.manual_seed(9)
    return Convolved()


def with_experts() -> WithExperts:
    torch.manual_seed(8)
    return WithExperts()


class Experts(nn.Module):
    """Every expert takes every token, weighted by its routing score. The tokens of all ranks that shard the experts are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8)

    def forward(self, x_BLM: torch.Tensor, scores_BLE: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.up, DTensor):
            return _by_experts(x_BLM, scores_BLE, self.up, self.down)
        mesh, up, down = self.up.device_mesh, local_of(self.up), local_of(self.down)
        first = mesh.get_local_rank() * len(up)
        x_BLM, scores_BLE = (GATHER(one, 0, mesh) for one in (x_BLM, scores_BLE))
        made = _by_experts(x_BLM, scores_BLE[..., first : first + len(up)], up, down)
        return SCATTER(made, "sum", 0, mesh)


def _by_experts(
    x_BLM: torch.Tensor, scores_BLE: torch.Tensor, up_EFM: torch.Tensor, down_EMF: torch.Tensor
) -> torch.Tensor:
    hidden_BLEF = functional.silu(torch.einsum("blm,efm->blef", x_BLM, up_EFM))
    return torch.einsum("blef,emf,ble->blm", hidden_BLEF, down_EMF, scores_BLE)


class WithExperts(nn.Module):
    """An embedding, one mixture of experts and the logits, with a scalar weight, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Mixture()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLM = self.tokens(tokens_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return self.head(x_BLM)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.heat = nn.Parameter(torch.tensor(1.5))

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + self.experts(x_BLM, (self.router(x_BLM) * self.heat).softmax(dim=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The mean loss of each step over all rows, and the rank's shard of each weight after the last step."""

    losses: tuple[float, ...]
    kept: dict[str, np.ndarray]


def train(make: Callable[[], nn.Module], plan: Plan | None, *, sum_gradients: bool = False) -> Trained:
    """Steps of SGD, whose result depends on the size of a gradient. ``plan`` None: on one device."""
    module = make()
    mesh = parallelize(module, plan, sum_gradients=sum_gradients, device=CPU) if plan is not None else None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        rows = batch if plan is None else _rows_of(batch, plan)
        tokens, targets = rows[:, :-1], rows[:, 1:]
        if mesh is not None and isinstance(module, AlongRows):
            tokens = DTensor.from_local(tokens, mesh["tensor"], [Replicate()], run_check=False)
        logits = module(tokens)
        assert isinstance(logits, DTensor) == isinstance(tokens, DTensor)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss * len(rows) / ROWS if sum_gradients else loss).backward()
        for name, one in module.named_parameters():
            if isinstance(one, DTensor):
                assert isinstance(one.grad, DTensor), name
                assert one.grad.placements == one.placements, (name, one.grad.placements)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if plan is not None:
            dist.all_reduce(mean)
            mean /= plan.mesh.num_devices
        losses.append(float(mean))
    return Trained(losses=tuple(losses), kept={name: kept_of(one) for name, one in module.named_parameters()})


def refused(unlike: Mapping[str, Sequence[int]], plan: Plan) -> str:
    """The message on a rank for a module with tensors that differ on some ranks; ``unlike``: these ranks by the tensor's name."""
    module = dense()
    module.register_buffer("angles", torch.arange(6.0))
    module.blocks[1].register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
    for name, ranks in unlike.items():
        if dist.get_rank() in ranks:
            if name == "extra":
                module.register_buffer("extra", torch.zeros(1))
            else:
                owner, _, leaf = name.rpartition(".")
                getattr(module.get_submodule(owner), leaf).data.add_(1)
    before = dict(module.named_parameters())
    try:
        parallelize(module, plan, device=CPU)
    except InputError as error:
        assert dict(module.named_parameters()) == before
        return str(error)
    assert torch.equal(module.get_buffer("angles"), torch.arange(6.0))
    return ""


def kept_of(one: torch.Tensor) -> np.ndarray:
    """A rank's local shard of a weight."""
    return local_of(one).detach().numpy().copy()


def _rows_of(batch: torch.Tensor, plan: Plan) -> torch.Tensor:
    spec = activation_spec(plan.request.layout, plan.mesh, "batch length", component="input")
    box = shard_box(spec, plan.mesh, tuple(batch.shape), dist.get_rank())
    assert box is not None
    return batch[box.slices]


def summing(make: Callable[[], nn.Module], plan: Plan) -> Trained:
    """As ``train``, with losses divided by the global count, and summed gradients."""
    return train(make, plan, sum_gradients=True)
