"""What an optimizer keeps is saved, or refused by name: every optimizer of ``torch.optim``, alone, in containers and in wrappers."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoint import CheckpointError, open_newest
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import Saver, load, save
from tests.engine_torch.own_saved import message

Optimizer = torch.optim.Optimizer
Maker = Callable[[list[nn.Parameter]], Any]

CLASSES = [
    one
    for _, one in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(one, Optimizer) and one is not Optimizer
]
assert len(CLASSES) >= 14


class Container(Optimizer):
    """As a trainer holds one optimizer for each part of its model: its own ``state`` stays empty."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([one for each in optimizers for group in each.param_groups for one in group["params"]], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for one in self.optimizers:
            one.step(closure)


class Wrapper(Optimizer):
    """Steps an optimizer that it holds."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.held = {"inner": [inner]}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.held["inner"][0].step(closure)


class Delegate:
    """Is what it holds, with a value more: its groups and its state are those of the other."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.scale = inner, 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SlowWeights(torch.optim.SGD):
    """Keeps a copy of each weight beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]


class Counted(torch.optim.SGD):
    """Its state dict has more than state and groups."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": 3}


class Slow:
    """Slow weights of a wrapper, without a dictionary of attributes."""

    __slots__ = ("weights",)

    def __init__(self, parameters: Any) -> None:
        self.weights = {"first": next(iter(parameters)).detach() + 1}


class WithSlow(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.slow = [Slow(parameters)]


class Failing(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("call distributed_state_dict")


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False), nn.Linear(2, 5, bias=False))


def trained(module: nn.Module, optimizer: Any, steps: int, *, sparse: bool = False) -> None:
    """Steps whose gradients follow from the weights."""

    def closure() -> torch.Tensor:
        for number, one in enumerate(module.parameters()):
            gradient = torch.sin(one.detach() + number)
            one.grad = gradient.to_sparse() if sparse else gradient
        return torch.zeros(())

    for _ in range(steps):
        closure()
        optimizer.step(closure)


def of_class(kind: type[Optimizer]) -> Maker:
    settings = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    return lambda parameters: kind(parameters, lr=1e-2, **settings)  # pyright: ignore[reportCallIssue]


def in_container(maker: Maker) -> Maker:
    return lambda parameters: Container([maker(parameters[:1]), maker(parameters[1:])])


def in_list(maker: Maker) -> Maker:
    return lambda parameters: Container([Container([maker(parameters[2:])]), maker(parameters[:2])])


PLAIN, WRAPPED = "Plain", "Wrapped"
WAYS: dict[str, tuple[Callable[[Maker], Maker], str]] = {
    "alone": (lambda maker: maker, PLAIN),
    "a container": (in_container, PLAIN),
    "containers in a container": (in_list, PLAIN),
    "its delegate": (lambda maker: lambda parameters: Delegate(maker(parameters)), PLAIN),
    "a wrapper": (lambda maker: lambda parameters: Wrapper(maker(parameters)), WRAPPED),
}


def resumed(maker: Maker, folder: Path, *, sparse: bool) -> tuple[nn.Module, nn.Module]:
    """A module that was trained for four steps, and one that was saved and loaded after two."""
    module = matrices()
    optimizer = maker(list(module.parameters()))
    trained(module, optimizer, 2, sparse=sparse)
    save(folder, module, optimizer, step=2)
    other = nn.Sequential(*(nn.Linear(one.in_features, one.out_features, bias=False) for one in module))  # pyright: ignore
    again = maker(list(other.parameters()))
    load(folder, other, again)
    trained(module, optimizer, 2, sparse=sparse)
    trained(other, again, 2, sparse=sparse)
    return module, other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_goes_on_exactly_or_is_refused(kind: type[Optimizer], way: str, tmp_path: Path) -> None:
    wrap, needed = WAYS[way]
    try:
        module, other = resumed(wrap(of_class(kind)), tmp_path, sparse=kind is torch.optim.SparseAdam)
    except (InputError, CheckpointError) as refused:
        text = str(refused)
        assert "held.inner[0]" in text if needed == WRAPPED else kind is torch.optim.LBFGS, text
        assert "optimizer." in text or kind.__name__ in text
        assert not list(tmp_path.rglob("manifest.json"))
        return
    assert needed == PLAIN
    for one, each in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, each)


def test_optimizers_of_several_types_and_other_containers(tmp_path: Path) -> None:
    """Which optimizer is in which container does not matter; which parameter it has does."""
    drawn = random.Random(7)
    for number in range(6):
        kinds = [drawn.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon]) for _ in range(3)]
        orders = [drawn.sample(range(3), 3) for _ in range(2)]

        def made(module: nn.Module, order: list[int], kinds: list[Any] = kinds) -> list[Optimizer]:
            parameters = list(module.parameters())
            return [of_class(kinds[place])([parameters[place]]) for place in order]

        module, other, folder = matrices(), matrices(), tmp_path / str(number)
        first, again = made(module, orders[0]), made(other, orders[1])
        trained(module, Container(first), 2)
        save(folder, module, drawn.choice([first, tuple(first), Container(first)]), step=2)
        load(folder, other, drawn.choice([again, tuple(again), Container(again)]))
        trained(module, Container(first), 2)
        trained(other, Container(again), 2)
        for one, each in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, each)


def test_a_container_of_one_type_is_as_one_optimizer(tmp_path: Path) -> None:
    module, other = matrices(), matrices()
    several = in_container(of_class(torch.optim.AdamW))(list(module.parameters()))
    trained(module, several, 2)
    save(tmp_path, module, several, step=2)
    assert "optimizer.exp_avg/2.weight" in open_newest(tmp_path).tensors
    single = torch.optim.AdamW(other.parameters())
    load(tmp_path, other, single)
    for one, each in zip(module.parameters(), other.parameters(), strict=True):
        owner = next(owner for owner in several if one in owner.state)
        assert torch.equal(single.state[each]["exp_avg"], owner.state[one]["exp_avg"])


def test_parameters_keep_their_optimizers(tmp_path: Path) -> None:
    module = matrices()
    first, *others = module.parameters()
    save(tmp_path, module, [torch.optim.SGD([first]), torch.optim.AdamW(others)], step=1)
    assert message(load, tmp_path, module, [torch.optim.AdamW([first]), torch.optim.SGD(others)]) == (
        "the checkpoint has the state of '0.weight' from SGD, and here AdamW has it. Give each parameter the optimizer that it had, or "
        "load the module only."
    )


def test_each_step_waits_for_a_save_of_several(tmp_path: Path) -> None:
    module = matrices()
    several = in_container(of_class(torch.optim.AdamW))(list(module.parameters()))
    trained(module, several, 1)
    with Saver(tmp_path, overlap=True) as saver:
        for step in (1, 2, 3):
            saver.save(module, several, step=step)
            before = [one.detach().clone() for one in module.parameters()]
            trained(module, several, 1)
    load(tmp_path, module)
    assert all(torch.equal(one, each) for one, each in zip(module.parameters(), before, strict=True))


ZERO = (
    "ZeroRedundancyOptimizer keeps on each rank the state of other parameters, in its 'optim': nothing of that would be saved. Shard "
    "weights and state instead, by `fully_shard` or by a layout that has an axis with the role `fsdp`, as `parallelize` does: then each "
    "rank of a plain torch optimizer keeps its own shards only, and they are saved."
)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("single_rank")
def test_optimizers_of_pytorch_that_hold_one(tmp_path: Path) -> None:
    # Loading it compiles functions, of which PyTorch warns.
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _NamedOptimizer

    module, where = matrices(), tmp_path / "plain"
    adamw = torch.optim.AdamW(module.parameters())
    save(where, module, adamw, step=1)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
    trained(module, zero, 1)
    assert message(save, tmp_path / "zero", module, zero, step=1) == ZERO
    assert message(load, where, module, zero) == ZERO
    assert message(save, tmp_path / "zero", module, [zero], step=1) == ZERO
    local = PostLocalSGDOptimizer(adamw, PeriodicModelAverager(period=2))
    assert message(save, tmp_path / "zero", module, local, step=1) == (
        "PostLocalSGDOptimizer has 'step' in its state_dict(), besides its state and its groups: it would not be saved. Give the "
        "optimizer inside, and the rest as `values`."
    )
    assert not list((tmp_path / "zero").rglob("manifest.json"))
    # Its state is that of the optimizer inside.
    named = _NamedOptimizer(module.named_parameters(), torch.optim.AdamW, lr=1e-2)
    trained(module, named, 1)
    save(tmp_path / "named", module, named, step=1)
    assert "optimizer.exp_avg/0.weight" in open_newest(tmp_path / "named").tensors


def stale(module: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer, 1)
    optimizer.param_groups[0]["params"].pop()
    return optimizer


def of_the_program(module: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.state["global"] = {"norm": torch.ones(3)}  # pyright: ignore[reportArgumentType]
    return optimizer


def twice(module: nn.Module) -> Any:
    return [torch.optim.SGD(module.parameters()), torch.optim.AdamW(list(module.parameters())[:1])]


def with_another(module: nn.Module) -> Optimizer:
    container = Container([torch.optim.SGD(list(module.parameters())[1:])])
    container.add_param_group({"params": [next(module.parameters())]})
    return container


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "tensors in an attribute": (
        lambda module: SlowWeights(module.parameters()),
        "SlowWeights keeps a tensor of shape (4, 3) as 'slow[0]', and not in its `state`: it would not be saved. Keep it in `state` by "
        "its parameter.",
    ),
    "tensors in an object of an attribute": (
        lambda module: WithSlow(module.parameters()),
        "WithSlow keeps a tensor of shape (4, 3) as 'slow[0].weights.first', and not in its `state`: it would not be saved. Keep it in "
        "`state` by its parameter.",
    ),
    "a state dict that fails": (
        lambda module: Failing(module.parameters()),
        "Failing.state_dict() fails, so that what it keeps besides its state cannot be known: NotImplementedError: call "
        "distributed_state_dict",
    ),
    "a value in its state dict": (
        lambda module: Counted(module.parameters()),
        "Counted has 'rounds' in its state_dict(), besides its state and its groups: it would not be saved. Give the optimizer inside, "
        "and the rest as `values`.",
    ),
    "state of a parameter in no group": (
        stale,
        "AdamW has state of a tensor of shape (5, 2), which is no parameter of its groups: it would not be saved. Keep it as state of "
        "a parameter or as an option of a group, or remove it from the optimizer's `state`.",
    ),
    "state of all": (
        of_the_program,
        "AdamW has state of 'global', which is no parameter of its groups: it would not be saved. Keep it as state of a parameter or "
        "as an option of a group, or remove it from the optimizer's `state`.",
    ),
    "a parameter of two": (
        twice,
        "two optimizers of list have one parameter of shape (4, 3): a checkpoint has one state of each. Give each parameter to one of "
        "them.",
    ),
    "a parameter of none": (
        with_another,
        "Container holds optimizers, and a parameter of shape (4, 3) that none of them has. Give it to one of them.",
    ),
    "a state dict": (
        lambda module: torch.optim.AdamW(module.parameters()).state_dict(),
        "optimizer: needed a torch.optim.Optimizer, or a list of them, found dict.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_checkpoint_would_have_is_named(case: str, tmp_path: Path) -> None:
    maker, text = REFUSED[case]
    module = matrices()
    assert message(save, tmp_path, module, maker(module), step=1) == text
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_flag_of_a_kernel_and_views_of_state_are_no_state(tmp_path: Path) -> None:
    module = matrices()
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer, 1)
    kept: Any = optimizer
    kept.overflow = torch.zeros(1, dtype=torch.int32)
    kept.flat = {"views": [each["exp_avg"].view(-1) for each in optimizer.state.values()]}
    kept.gradients = [one.grad for one in module.parameters()]
    save(tmp_path, module, optimizer, step=1)
