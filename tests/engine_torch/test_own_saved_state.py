"""Which state of a user's own program is saved and loaded: optimizers of every kind, averages, values, parts; on one process."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwright.checkpoint import CheckpointError, DamagedError, open_newest
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import load, save
from tests.engine_torch.own_saved import Small, message, numbered, run_of

Optimizer = torch.optim.Optimizer
MAKERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, fused=True),
    "a tensor as the rate": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def train(module: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        for number, one in enumerate(module.parameters()):
            one.grad = torch.sin(one.detach() + number + step)
        optimizer.step()


def small() -> Any:
    torch.manual_seed(0)
    return Small()


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, with other decays."""
    decayed = [one for one in module.parameters() if one.dim() > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [one for one in module.parameters() if one.dim() == 1], "weight_decay": 0.0},
    ]


def same(found: Any, needed: Any) -> bool:
    """Equal types, dtypes and bits."""
    if isinstance(needed, torch.Tensor):
        return found.dtype == needed.dtype and found.device == needed.device and torch.equal(found, needed)
    if isinstance(needed, dict):
        return found.keys() == needed.keys() and all(same(found[key], needed[key]) for key in needed)
    if isinstance(needed, list | tuple):
        return type(found) is type(needed) and len(found) == len(needed) and all(map(same, found, needed))
    return type(found) is type(needed) and found == needed


@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_goes_on_as_if_it_had_not_ended(kind: str, tmp_path: Path) -> None:
    module = small()
    optimizer = MAKERS[kind](grouped(module))
    train(module, optimizer, 2)
    save(tmp_path, module, optimizer, step=2)
    other = numbered()
    again = MAKERS[kind](grouped(other))
    load(tmp_path, other, again)
    assert same(again.state_dict(), optimizer.state_dict())
    for one, each in ((module, optimizer), (other, again)):
        train(one, each, 2)
    assert same(other.state_dict(), module.state_dict())
    assert same(again.state_dict(), optimizer.state_dict())


def test_parameters_may_be_in_other_groups_and_another_order(tmp_path: Path) -> None:
    module = small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    train(module, optimizer, 1)
    save(tmp_path, module, optimizer, step=1)
    other = small()
    again = torch.optim.AdamW([{"params": [one]} for one in reversed(list(other.parameters()))], lr=1.0)
    load(tmp_path, other, again)
    assert {group["lr"] for group in again.param_groups} == {0.5}
    for one, parameter in zip(module.parameters(), other.parameters(), strict=True):
        assert same(again.state[parameter], optimizer.state[one])


def test_groups_that_are_joined_need_equal_options(tmp_path: Path) -> None:
    module = small()
    save(tmp_path, module, torch.optim.AdamW(grouped(module), lr=1.0), step=1)
    assert message(load, tmp_path, module, torch.optim.AdamW(module.parameters())) == (
        "the optimizer has 'tokens.weight' and 'up.bias' in one group, and in the checkpoint their 'weight_decay' differs: 0.1 and "
        "0.0. Give them the groups that they had, or load without optimizer.options."
    )


def test_averages_are_saved_as_weights_are(tmp_path: Path) -> None:
    module = small()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), 1)
    average.update_parameters(module)
    average.update_parameters(module)
    save(tmp_path, module, averages=average, step=1)
    tensors = open_newest(tmp_path).tensors
    assert tensors["average/up.weight"].shape == tensors["up.weight"].shape
    other = AveragedModel(numbered(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    load(tmp_path, numbered(), averages=other)
    assert same(other.state_dict(), average.state_dict())
    # Without averages, those of the checkpoint are not asked for.
    load(tmp_path, module)


def test_averages_by_name(tmp_path: Path) -> None:
    module = small()
    averages = {name: one.detach() * 0.5 for name, one in module.named_parameters()}
    save(tmp_path, module, averages=averages, step=1)
    found = {name: torch.zeros_like(one) for name, one in averages.items()}
    load(tmp_path, module, averages=found)
    assert same(found, averages)


def test_values_are_what_they_were(tmp_path: Path) -> None:
    values = {
        "next_row": 8,
        "best": math.inf,
        "pair": (1, [2.5, None, True]),
        "$odd": {"$tuple": "text"},
        "by number": {3: "three", (1, 2): "pair"},
        "scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3).state_dict(),
    }
    save(tmp_path, small(), step=1, values=values)
    assert same(load(tmp_path, small()).values, values)
    assert math.isnan(_round_trip(tmp_path / "nan", math.nan))


def _round_trip(folder: Path, value: Any) -> Any:
    save(folder, small(), step=1, values={"one": value})
    return load(folder, small()).values["one"]


class WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_a_value_or_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, nn.Sequential(WithExtraState({"scale": (1, 2)})), step=1)
    module = nn.Sequential(WithExtraState(None))
    load(tmp_path, module)
    assert module[0].extra == {"scale": (1, 2)}
    assert message(save, tmp_path, nn.Sequential(WithExtraState({1, 2})), step=2) == (
        "'0._extra_state' is a builtins.set: a checkpoint holds tensors, and values that JSON has; it never pickles. Save what it "
        "consists of, or leave it out."
    )
    assert "\n  '0._extra_state': missing\n" in message(load, _without_extra(tmp_path / "other"), module)


def _without_extra(folder: Path) -> Path:
    save(folder, nn.Sequential(nn.Identity()), step=1)
    return folder


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.uint16,
    ],
)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2 if dtype == torch.bool else 256, (4, 16), np.uint8))
    one = bits.view(dtype)
    module = run_of({"w": one, "transposed": one.clone().t()})
    save(tmp_path, module, step=1)
    other = run_of({"w": torch.zeros_like(one), "transposed": torch.zeros_like(one).t()})
    load(tmp_path, other)
    assert torch.equal(other.w.detach().view(torch.uint8), bits)
    assert torch.equal(other.transposed.detach().t().contiguous().view(torch.uint8), bits)


def test_names_are_those_of_the_module_that_was_compiled(tmp_path: Path) -> None:
    module = small()
    compiled: Any = torch.compile(module, backend="eager")
    save(tmp_path, compiled, step=1)
    assert set(open_newest(tmp_path).tensors) == {"tokens.weight", "up.weight", "up.bias", "down.weight", "seen"}
    load(tmp_path, small())


def test_names_and_not_the_tree_decide(tmp_path: Path) -> None:
    """Modules may be registered in another order."""

    class Reordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))
            self.down, self.up = nn.Linear(7, 6, bias=False), nn.Linear(6, 7)
            self.tokens = nn.Embedding(13, 6)

    save(tmp_path, numbered(), step=1)
    module = Reordered()
    load(tmp_path, module)
    assert same(module.up.weight.detach(), numbered().up.weight.detach())


def changed(**others: Any) -> Any:
    module = small()
    for name, one in others.items():
        setattr(module, name, one)
    return module


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (
            changed(up=nn.Linear(6, 8)),
            ["'up.weight': shape: found (7, 6), needed (8, 6)", "'up.bias': shape: found (7,), needed (8,)"],
        ),
        (
            changed(up=nn.Linear(6, 7, bias=False)),
            [
                "'up.bias': extra, float32 (7,), which is not asked for",
                "On request: only=[patterns] loads some of the names.",
            ],
        ),
        (
            changed(gate=nn.Linear(6, 7, bias=False)),
            ["'gate.weight': missing", "On request: only=[patterns] loads some of the names."],
        ),
        (
            changed(up=nn.Linear(6, 7, dtype=torch.bfloat16)),
            [
                "'up.weight': dtype: found float32, needed bfloat16",
                "'up.bias': dtype: found float32, needed bfloat16",
                "On request: cast=True casts floating dtypes.",
            ],
        ),
    ],
    ids=["shape", "extra", "missing", "dtype"],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path, module: nn.Module, lines: list[str]) -> None:
    where = save(tmp_path, numbered(), step=1)
    before = copy.deepcopy(module.state_dict())
    first, *found = message(load, tmp_path, module).split("\n")
    assert first == f"{where}: the checkpoint does not fit, and nothing of it was loaded:"
    assert [line.strip() for line in found] == lines
    assert same(module.state_dict(), before)


def test_a_cast_on_request(tmp_path: Path) -> None:
    module = small()
    save(tmp_path, module, step=1)
    other = small().to(torch.bfloat16)
    load(tmp_path, other, cast=True)
    assert same(other.up.weight.detach(), module.up.weight.detach().to(torch.bfloat16))
    integers = run_of({"up.weight".replace(".", "_"): torch.zeros(2, dtype=torch.int32)})
    save(tmp_path / "int", run_of({"up_weight": torch.ones(2)}), step=1)
    assert "found float32, needed int32" in message(load, tmp_path / "int", integers, cast=True)


def test_a_part_on_request(tmp_path: Path) -> None:
    module = small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    train(module, optimizer, 1)
    save(tmp_path, module, optimizer, step=1)
    other = changed(gate=nn.Linear(6, 7, bias=False))
    again = torch.optim.AdamW(other.parameters(), lr=0.25)
    loaded = load(tmp_path, other, again, only=["up.*", "optimizer.*/up.weight"])
    assert loaded.kept == ("seen", "tokens.weight", "down.weight", "gate.weight")
    assert same(other.up.state_dict(), module.up.state_dict())
    assert same(again.state[other.up.weight], optimizer.state[module.up.weight])
    assert not again.state[other.up.bias]
    assert again.param_groups[0]["lr"] == 0.25
    load(tmp_path, other, again, only=["optimizer.options"])
    assert again.param_groups[0]["lr"] == 0.5
    assert message(load, tmp_path, other, only=["up.wieght*"]) == (
        "only: the pattern 'up.wieght*' matches no name. Did you mean 'up.weight'?"
    )
    assert message(load, tmp_path, other, again, only=["optimizer.exp_avg/up.weight"]) == (
        "only: it takes a part of the optimizer's state of 'up.weight': optimizer.step/up.weight, optimizer.exp_avg/up.weight, "
        "optimizer.exp_avg_sq/up.weight. Take all of it or none."
    )


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (meta(), "'weight' is on the meta device: it has no values. Call to_empty, and initialise or load it."),
        (
            nn.LazyLinear(3),
            "'weight' has no shape yet: call the module with a first batch, which makes its lazy parameters.",
        ),
        (run_of({"w": torch.eye(2).to_sparse()}), "'w' is torch.sparse_coo: save dense tensors."),
        (
            run_of({"w": torch.zeros(2, dtype=torch.complex128)}),
            "tensor 'w': a checkpoint does not hold dtype 'complex128'.",
        ),
    ],
    ids=["meta", "lazy", "sparse", "dtype"],
)
def test_tensors_that_a_checkpoint_does_not_hold(module: nn.Module, text: str, tmp_path: Path) -> None:
    assert message(save, tmp_path, module, step=1).startswith(text)
    assert not list(tmp_path.rglob("manifest.json"))


def test_optimizers_that_are_not_of_the_module(tmp_path: Path) -> None:
    module = small()
    assert message(save, tmp_path, module, torch.optim.SGD(nn.Linear(3, 2).parameters()), step=1) == (
        "the optimizer has a parameter of shape (2, 3) that is not in the module's state_dict(). Give the module that has all its "
        "parameters, and make the optimizer after the module is sharded."
    )
    where = save(tmp_path, module, step=1)
    adamw = torch.optim.AdamW(module.parameters())
    assert message(load, tmp_path, module, adamw) == f"{where}: it has no optimizer's state. Load the module only."
    save(tmp_path, module, torch.optim.SGD(module.parameters()), step=2)
    assert message(load, tmp_path, module, adamw) == (
        "the checkpoint has the state of SGD, and this optimizer is AdamW. Load the module only, without an optimizer."
    )


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    directory = save(tmp_path, numbered(), step=1)
    file = next(directory.glob("boxes-*"))
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"do not match their digest.* The module is partly loaded"):
        load(tmp_path, small())


def test_checkpoints_of_a_training_run_have_no_values(tmp_path: Path) -> None:
    from tests.checkpoint.states import save as save_run
    from tests.checkpoint.states import small_state

    save_run(tmp_path, small_state())
    with pytest.raises(CheckpointError, match=re.escape("it has no values of a program of your own")):
        load(tmp_path, small())


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no checkpoint here"):
        load(tmp_path, small())


def test_ranks_that_are_gone_end_the_save_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ends after the save has begun: the others' collective fails."""
    exchanged = []

    def gathered(found: list[Any], value: Any, group: Any = None) -> None:
        del group
        exchanged.append(value)
        if any("step-00000001.saving-" in str(one) for one in exchanged):
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:40123\nmore")
        found[:] = [value] * len(found)

    monkeypatch.setattr("shardwright.runs.own_program.witnesses.WAIT_S", 0.0)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda *_: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
    assert message(save, tmp_path, nn.Linear(2, 2), step=1) == (
        "the 2 ranks could not exchange values: one of them has ended, or their timeout has passed. [gloo] Connection closed "
        "by peer [127.0.0.1]:40123"
    )
    assert not (tmp_path / "checkpoints").exists()
