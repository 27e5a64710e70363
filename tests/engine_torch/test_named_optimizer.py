"""Optimizers of ``torch.optim`` by their names there: what they keep, the numbers of PyTorch, and those that no shard can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.training.named_optimizer import change, described

SHAPES = {"matrix": (6, 4), "scale": (4,)}


def drawn(step: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(step)
    return {name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("name", "settings", "kept", "shared"),
    [
        ("RAdam", {"betas": "0.8/0.9"}, {"exp_avg", "exp_avg_sq"}, {"step"}),
        ("NAdam", {}, {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
        ("Rprop", {"etas": "0.5/1.2"}, {"prev", "step_size"}, {"step"}),
        ("ASGD", {"t0": "1"}, {"ax"}, {"step", "eta", "mu"}),
        ("Adam", {"amsgrad": "true"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
        ("SGD", {}, set(), set()),
    ],
)
def test_a_step_of_two_shards_is_that_of_pytorch(
    name: str, settings: dict[str, str], kept: set[str], shared: set[str]
) -> None:
    """Saved after the second step and loaded again, as at a checkpoint."""
    optimizer = described(name, settings, SHAPES)
    assert {one.prefix for one in optimizer.kept} == {f"optimizer/{key}/" for key in kept}
    assert set(optimizer.shared) == {f"optimizer/{key}" for key in shared}
    made = getattr(torch.optim, name)
    theirs = {name: torch.nn.Parameter(array) for name, array in drawn(100).items()}
    weights = {**dict(zip("ab", drawn(100)["matrix"].clone().split(3), strict=True)), "scale": drawn(100)["scale"]}
    other = made(
        theirs.values(),
        lr=0.1,
        **({"weight_decay": 0.0} if "weight_decay" in made.__init__.__annotations__ else {}),
        **optimizer.constants,
    )
    state, numbers = {one.prefix: {} for one in optimizer.kept}, {}
    for step in range(4):
        gradients = drawn(step)
        for key, parameter in theirs.items():
            parameter.grad = gradients[key]
        other.step()
        shards = {**dict(zip("ab", gradients["matrix"].split(3), strict=True)), "scale": gradients["scale"]}
        change(optimizer, weights, shards, state, numbers, 0.1)
        state = {prefix: {key: array.clone() for key, array in arrays.items()} for prefix, arrays in state.items()}
        numbers = {key: value.clone() for key, value in numbers.items()}
        assert all(shard.grad is None for shard in weights.values())
    torch.testing.assert_close(torch.cat([weights["a"], weights["b"]]), theirs["matrix"].detach())
    torch.testing.assert_close(weights["scale"], theirs["scale"].detach())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Adamm", {}, "--optimizer: torch has no optimizer 'Adamm'. Did you mean 'torch:Adam'?"),
        ("RAdam", {"lr": "1"}, "--optimizer-set: lr of torch:RAdam cannot be set here. It is --lr, with its schedule."),
        ("RAdam", {"foreach": "true"}, "foreach of torch:RAdam cannot be set here. The engine sets it."),
        (
            "RAdam",
            {"betas": "2/3"},
            "--optimizer torch:RAdam betas=2/3: it cannot be made of these constants, or needs more",
        ),
        ("Adafactor", {}, "its state 'row_var' has shape (2, 1), and its weight (2, 3)."),
        ("LBFGS", {}, "--optimizer torch:LBFGS"),
        ("Muon", {}, "--optimizer torch:Muon"),
        ("SparseAdam", {}, "--optimizer torch:SparseAdam"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        described(name, settings, SHAPES)
    assert message in str(refused.value)


def test_an_update_that_is_not_element_by_element_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(torch.optim.Optimizer):
        """Divides each gradient by its norm."""

        def __init__(self, params, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            del closure
            for group in self.param_groups:
                for one in group["params"]:
                    one -= group["lr"] * one.grad / one.grad.norm()

    monkeypatch.setattr(torch.optim, "Normed", Normed, raising=False)
    with pytest.raises(InputError) as refused:
        described("Normed", {}, SHAPES)
    assert str(refused.value) == (
        "--optimizer torch:Normed: it computes the elements of a weight together, and a rank has only its shard of each. Give one "
        "that both engines have: adadelta, adagrad, adamax, adamw, lion, rmsprop, sgd."
    )
