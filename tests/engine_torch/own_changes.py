"""A user's own module that is made, moved, tied, frozen and loaded in a random order, before and after ``parallelize``: each step of it is
that of one process, or is refused by name.

    python -m tests.engine_torch.own_changes --count 600 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional
from torch.nn.utils import parametrize

from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.own_program.module import parallelize
from tests.engine_torch.meeting import in_group
from tests.engine_torch.own_block import CPU, NAMES, NAMES_WITH_EXPERTS, ROWS, VOCAB, Transformer, WithExperts, plan_of
from tests.engine_torch.ranks import Ranks

TENSOR = {"elsewhere": "tensor", "residual": "idle"}
EXPERT = {"elsewhere": "fsdp", "moe": "expert"}
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, int]]] = {
    "ddp": ({"data": "data"}, {"data": 4}),
    "fsdp": ({"fsdp": "fsdp"}, {"fsdp": 4}),
    "hsdp": ({"data": "data", "fsdp": "fsdp"}, {"data": 2, "fsdp": 2}),
    "ep": ({"data": "data", "expert": EXPERT}, {"data": 2, "expert": 2}),
    "ddp-tp": ({"data": "data", "tensor": TENSOR}, {"data": 2, "tensor": 2}),
    "fsdp-tp": ({"fsdp": "fsdp", "tensor": TENSOR}, {"fsdp": 2, "tensor": 2}),
}
LENGTH = 5
TOLERANCE = 2e-5
"""Of a weight and of a loss, relative to their size: float32, sums in another order."""


class Gains(nn.Module):
    """Weights that nothing shards. ``turned``: they are used in another order; ``without``: the second one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 1.5))
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("offset", torch.tensor(0.25))
        self.turned = self.without = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors: list[Callable[[], torch.Tensor]] = [lambda: self.first.sum() - 2, lambda: self.second.mean()]
        for factor in factors[: 1 if self.without else 2][:: -1 if self.turned else 1]:
            x = x * factor()
        return x * (self.scale + self.get_buffer("offset"))


class Dense(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.gains = Gains()

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLM = self.tokens(tokens_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return self.head(self.gains(self.norm(x_BLM)))


class Mixed(WithExperts):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(*self.tokens.weight.shape[::-1], bias=False)
        self.gains = Gains()

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLM = self.tokens(tokens_BL)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return self.head(self.gains(x_BLM))


GAINS = {"gains.scale": "residual:", "gains.first": "residual: _gain", "gains.second": "residual: _gain"}


class Half(nn.Module):
    """A parametrization that keeps the parameter that there was."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def made(layout: str, *, tied: bool) -> Any:
    torch.manual_seed(11)
    module = Mixed() if layout == "ep" else Dense()
    with torch.no_grad():
        module.tokens.weight.mul_(0.1)
    if tied:
        module.head.weight = module.tokens.weight
    return module


def planned(layout: str, *, tied: bool) -> Plan:
    roles, sizes = LAYOUTS[layout]
    names = {**(NAMES_WITH_EXPERTS if layout == "ep" else NAMES), **GAINS}
    names["head.weight"] = "logits: vocab embed"
    if tied:
        del names["head.weight"]
    return plan_of(roles, sizes, made(layout, tied=tied), names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A case: the layout, whether the module is tied and without values before, and the changes, each before a step."""

    layout: str
    tied: bool
    on_meta: bool
    changes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        steps = ", ".join(f"{change} {name}".strip() for change, name in self.changes)
        return f"{self.layout}{' tied' * self.tied}{' meta' * self.on_meta}: {steps}"


def drawn(seed: int) -> Drawn:
    source = random.Random(seed)
    layout = source.choice(list(LAYOUTS))
    inside = ["blocks.0.router.weight", "blocks.0.heat"] if layout == "ep" else ["blocks.1.up.weight", "norm.weight"]
    names = ["head.weight", "gains.first", "gains.second", "gains.scale", *inside]
    changes = tuple((source.choice(list(CHANGES)), source.choice(names)) for _ in range(source.randint(1, 4)))
    return Drawn(layout=layout, tied=source.random() < 0.25, on_meta=source.random() < 0.4, changes=changes)


def leaf_of(module: Any, name: str) -> tuple[Any, str]:
    owner, _, leaf = name.rpartition(".")
    module = module.get_submodule(owner)
    if parametrize.is_parametrized(module, leaf):
        return module.get_submodule(f"parametrizations.{leaf}"), "original"
    return module, leaf


def weight_of(module: Any, name: str) -> nn.Parameter:
    owner, leaf = leaf_of(module, name)
    return owner.get_parameter(leaf)


def put(parameter: torch.Tensor, full: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _load(module: Any, _name: str, *, assign: bool) -> Any:
    state = {key: (value * 0.9).detach() for key, value in module.state_dict().items()}
    module.load_state_dict(state, assign=assign)
    return module


def _data(module: Any, name: str) -> Any:
    weight = weight_of(module, name)
    if isinstance(weight, DTensor):
        # 2.13: assigning to ``.data`` of a DTensor changes nothing, without an error.
        weight.data.mul_(0.9)
    else:
        weight.data = weight.detach() * 0.9
    return module


def _replace(module: Any, name: str) -> Any:
    owner, leaf = leaf_of(module, name)
    setattr(owner, leaf, nn.Parameter(owner.get_parameter(leaf).detach() * 0.9))
    return module


def _tie(module: Any, name: str) -> Any:
    first, second = ("tokens.weight", "head.weight") if name == "head.weight" else ("gains.first", "gains.second")
    owner, leaf = leaf_of(module, second)
    setattr(owner, leaf, weight_of(module, first))
    return module


def _untie(module: Any, _name: str) -> Any:
    if weight_of(module, "head.weight") is weight_of(module, "tokens.weight"):
        return _replace(module, "head.weight")
    return module


def _freeze(module: Any, name: str) -> Any:
    weight = weight_of(module, name)
    weight.requires_grad_(not weight.requires_grad)
    return module


def _thaw(module: Any, _name: str) -> Any:
    module.requires_grad_(False)
    return module.requires_grad_(True)


def _parametrize(module: Any, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner)
    if not parametrize.is_parametrized(owner, leaf):
        parametrize.register_parametrization(owner, leaf, Half())
    return module


def ties_of(module: Any) -> list[list[str]]:
    """The names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def tie_again(module: Any, ties: Sequence[Sequence[str]]) -> None:
    """``to`` and ``to_empty`` untie plain tensors, and leave DTensors tied."""
    for first, *others in ties:
        for name in others:
            owner, _, leaf = name.rpartition(".")
            if module.get_parameter(name) is not module.get_parameter(first):
                setattr(module.get_submodule(owner), leaf, module.get_parameter(first))


def _convert(module: Any, _name: str) -> Any:
    """As ``to`` makes new parameters where it cannot change the data of the old ones."""
    ties = ties_of(module)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        module = module.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    tie_again(module, ties)
    return module


def _empty(module: Any, _name: str) -> Any:
    values, ties = {key: full(value).clone() for key, value in module.state_dict().items()}, ties_of(module)
    module.to("meta")
    module.to_empty(device="cpu")
    tie_again(module, ties)
    for key, value in module.state_dict().items():
        put(value, values[key])
    return module


def _use_otherwise(module: Any, name: str) -> Any:
    """Ranks use weights in another order, and one of them not at all."""
    module.turns = not getattr(module, "turns", False)
    module.omits = name == "gains.second"
    return module


def _adapt(module: Any, _name: str) -> Any:
    module.gains.scale = nn.Parameter(module.gains.scale.detach() * 1.1)
    module.gains.third = nn.Parameter(torch.ones(2))
    return module


CHANGES: Mapping[str, Callable[[Any, str], Any]] = {
    "load": lambda module, name: _load(module, name, assign=False),
    "assign": lambda module, name: _load(module, name, assign=True),
    "deepcopy": lambda module, _: copy.deepcopy(module),
    "data": _data,
    "replace": _replace,
    "tie": _tie,
    "untie": _untie,
    "freeze": _freeze,
    "thaw": _thaw,
    "parametrize": _parametrize,
    "convert": _convert,
    "empty": _empty,
    "use otherwise": _use_otherwise,
    "adapt": _adapt,
}


def loss_of(
    module: Any, rows: torch.Tensor, rank: int, tensor: DeviceMesh | None = None, *, uses: bool = True
) -> torch.Tensor:
    """The mean loss of a rank's rows, as this rank uses the weights. ``uses``: ranks use them otherwise, if they are to."""
    if uses:
        module.gains.turned = getattr(module, "turns", False) and rank % 2 == 1
        module.gains.without = getattr(module, "omits", False) and rank == 0
    tokens, targets = rows[:, :-1], rows[:, 1:]
    if tensor is not None:
        tokens = DTensor.from_local(tokens, tensor, [Replicate()], run_check=False)
    logits = module(tokens)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(module: Any) -> None:
    torch.optim.SGD([weight for weight in module.parameters() if weight.requires_grad], lr=0.2, foreach=False).step()
    module.zero_grad()


def checked(case: Drawn) -> str:
    """What became of a case on this rank: as one process, refused, or wrong."""
    alone = made(case.layout, tied=case.tied)
    values = {key: value.detach().clone() for key, value in alone.state_dict().items()}
    module = made(case.layout, tied=case.tied)
    if case.on_meta:
        module = module.to("meta")
        if case.tied:
            module.head.weight = module.tokens.weight
    plan = planned(case.layout, tied=case.tied)
    mesh = parallelize(module, plan, device=CPU)
    if case.on_meta:
        ties = ties_of(module)
        module.to_empty(device="cpu")
        tie_again(module, ties)
        for key, value in module.state_dict().items():
            put(value, values[key])
    tensor = mesh["tensor"] if "tensor" in (mesh.mesh_dim_names or ()) else None
    num = plan.mesh.num_devices // (tensor.size() if tensor is not None else 1)
    own = dist.get_rank() // (plan.mesh.num_devices // num)
    generator = torch.Generator().manual_seed(5)
    for number, (change, name) in enumerate((("", ""), *case.changes, ("", ""))):
        batch = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        if change:
            try:
                module = CHANGES[change](module, name)
            except (InputError, RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
                return f"refused at {change}: {type(error).__name__} {error}"
            alone = CHANGES[change](alone, name)
        try:
            loss = loss_of(module, batch.chunk(num)[own], own, tensor, uses=tensor is None)
            loss.backward()
        except InputError as error:
            return f"refused: {error}"
        shares = [loss_of(alone, rows, rank, uses=tensor is None) for rank, rows in enumerate(batch.chunk(num))]
        torch.stack(shares).mean().backward()
        step(module)
        step(alone)
        value, expected = loss.item(), shares[own].item()
        # ``swap_tensors`` refuses a weight that a graph still has.
        del loss, shares
        if abs(value - expected) > TOLERANCE * max(1.0, abs(expected)):
            return f"wrong: loss {value} beside {expected} in step {number}"
        others = dict(alone.named_parameters())
        for key, weight in module.named_parameters():
            other = others[key].detach()
            error = (full(weight) - other).abs().max().item()
            if error > TOLERANCE * max(1.0, other.abs().max().item()):
                return f"wrong: weight '{key}' is off by {error:.1e} in step {number}"
    return "equal"


def outcomes(seeds: Sequence[int]) -> list[str]:
    """Of each case, on this rank."""
    return [_outcome(drawn(seed)) for seed in seeds]


def _outcome(case: Drawn) -> str:
    try:
        return checked(case)
    except Exception as error:
        return f"wrong: {type(error).__name__} {error}"


def by_outcome(ranks: Ranks, seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """How many cases were equal and refused, and a line for each of the others."""
    counts, wrong = Counter[str](), list[str]()
    for seed, answers in zip(seeds, zip(*ranks.run(outcomes, seeds, limit_s=600.0), strict=True), strict=True):
        # A message counts the ranks that have a gradient, and is the same on all.
        kinds = {answer if answer.startswith("wrong") else answer.partition(" ")[0].strip(":") for answer in answers}
        if len(kinds) == 1 and not answers[0].startswith("wrong"):
            counts[kinds.pop()] += 1
        else:
            wrong.append(f"seed {seed}, {drawn(seed)}: {' | '.join(sorted(kinds))}")
    return counts, wrong


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--count", type=int, default=600)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    four = Ranks(4, in_group)
    try:
        totals, wrong = by_outcome(four, range(options.seed, options.seed + options.count))
    finally:
        four.end()
    print("\n".join([*wrong, ", ".join(f"{count} {kind}" for kind, count in sorted(totals.items()))]))
    sys.exit(bool(wrong))
