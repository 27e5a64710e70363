"""What users of ``save`` and ``load`` get wrong in their first hour, and what they give in good faith, as numbers of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from shardwright.checkpoint import Retention, open_newest
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import load, save
from shardwright.engine_torch.dcp_folder.exporting import export_folder
from shardwright.engine_torch.dcp_folder.importing import import_folder


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def message(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_a_step_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    assert message(load, tmp_path, small(), step=4).startswith(f"{tmp_path}: there is no checkpoint here.")
    directories = [save(tmp_path, small(), step=step) for step in (3, 5)]
    assert message(load, tmp_path, small(), step=4) == (
        f"{tmp_path}: there is no checkpoint of step 4. Those there, the newest first: 5, 3."
    )
    assert message(load, directories[0], small(), step=4) == (
        f"{directories[0]}: it is of step 3, and step 4 was asked for. Give the folder of all steps, or leave out the step."
    )
    assert load(tmp_path, small(), step=3).step == load(directories[0], small(), step=3).step == 3


def test_many_steps_are_not_all_named(tmp_path: Path) -> None:
    for step in range(1, 23):
        save(tmp_path, nn.Module(), step=step)
    newest = ", ".join(str(step) for step in range(22, 2, -1))
    assert message(load, tmp_path, nn.Module(), step=99) == (
        f"{tmp_path}: there is no checkpoint of step 99. Those there, the newest first: {newest}, and 2 older ones."
    )


def test_one_pattern_may_be_a_text(tmp_path: Path) -> None:
    """Its letters were taken for patterns: 'a*' loaded everything where a tensor is called 'a'."""
    save(tmp_path, small(), step=1)
    assert load(tmp_path, small(), only="0.*").kept == ("1.weight", "1.bias")


@pytest.mark.parametrize("loss", [2.5, np.float32(2.5), np.array(2.5), torch.tensor(2.5, requires_grad=True)], ids=repr)
def test_metrics_of_any_library(tmp_path: Path, loss: Any) -> None:
    save(tmp_path, small(), step=1, metrics={"loss": loss}, keep=Retention(best=1))
    found = open_newest(tmp_path).point.metrics["loss"]
    assert (found, type(found)) == (2.5, float)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    for value in (torch.tensor(float("nan")), float("nan")):
        assert message(save, tmp_path, small(), step=1, metrics={"loss": value}) == (
            "the metric 'loss' is nan, and must be a finite number. Leave it out."
        )
    assert message(save, tmp_path, small(), step=1, metrics={"loss": np.zeros(2)}) == (
        "the metric 'loss' is array([0., 0.]), and must be a finite number. Leave it out."
    )


VALUES = {"lr": np.float64(0.1), "seen": [np.int64(2**62), (np.float32(0.1), np.bool_(True))], np.int32(3): None}


def test_numbers_of_numpy_keep_their_type(tmp_path: Path) -> None:
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=np.float32(0.1))  # pyright: ignore[reportArgumentType]
    save(tmp_path / "ours", module, optimizer, step=1, values=VALUES)
    export_folder(tmp_path / "ours", tmp_path / "dcp-1")
    import_folder(tmp_path / "dcp-1", tmp_path / "again")
    for folder in ("ours", "again"):
        fresh = torch.optim.SGD(module.parameters(), lr=1.0)
        found = load(tmp_path / folder, module, fresh).values
        assert repr(found) == repr(VALUES)
        assert repr(fresh.param_groups[0]["lr"]) == "np.float32(0.1)"


def test_what_is_no_module_and_what_are_no_values(tmp_path: Path) -> None:
    state = small().state_dict()
    needed = "module: needed an nn.Module, found OrderedDict: give the module itself and not its state_dict()."
    assert message(save, tmp_path, state, step=1) == needed
    assert message(save, tmp_path, [1], step=1) == "module: needed an nn.Module, found list: give the module itself."
    assert message(save, tmp_path, small(), step=1, values=[1, 2]) == (
        "values: found [1, 2], needed a mapping of names to values."
    )
    assert message(save, tmp_path, small(), step=1, values={"last": torch.ones(2)}) == (
        "values['last'] is a torch.Tensor, and a value has no arrays inside. Give its numbers, as tolist() makes them, or save it "
        "as a tensor."
    )
    assert not (tmp_path / "checkpoints").exists()
    save(tmp_path, small(), step=1)
    assert message(load, tmp_path, state) == needed


def test_a_parameter_that_was_frozen_when_it_was_saved(tmp_path: Path) -> None:
    module = small()
    last = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)  # pyright: ignore[reportIndexIssue]
    module(torch.ones(1, 3)).sum().backward()
    last.step()
    save(tmp_path, module, last, step=1)
    fresh = small()
    state = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    assert message(load, tmp_path, fresh, state) == (
        "the checkpoint has no optimizer's state of '0.weight'. With only=['*'] such a parameter keeps the state that it has, and "
        "the others get theirs."
    )
    load(tmp_path, fresh, state, only=["*"])
    assert [len(state.state[one]) for one in fresh.parameters()] == [0, 0, 1, 1]


def test_a_tied_weight_into_a_module_that_does_not_tie_it(tmp_path: Path) -> None:
    tied: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    where = save(tmp_path, tied, step=1)
    untied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    assert message(load, tmp_path, untied) == (
        f"{where}: the checkpoint does not fit, and nothing of it was loaded:\n"
        "  '1.weight': missing; it was tied to '0.weight' when it was saved, and has that name only\n"
        "On request: only=[patterns] loads some of the names."
    )


class Extra(nn.Module):
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def trained(module: nn.Module, step: int) -> tuple[nn.Module, torch.optim.Optimizer, AveragedModel]:
    average, optimizer = AveragedModel(module), torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(step):
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        average.update_parameters(module)
    return module, optimizer, average


def test_copies_of_data_parallelism_have_the_names_of_the_module(tmp_path: Path) -> None:
    """``module.`` was a part of the names: what DistributedDataParallel saved loaded into nothing else."""

    def made() -> Any:
        return nn.Sequential(
            nn.Linear(3, 3), nn.ModuleDict({"inner": nn.Linear(3, 3), "extra": Extra()})["inner"], Extra()
        )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        wrapped = made()
        wrapped[1] = DistributedDataParallel(wrapped[1])
        wrapped[2].forward = lambda rows: rows
        module, optimizer, average = trained(wrapped, 2)
        wrapped[2].kept = {"rows": 4}
        where = save(tmp_path, module, optimizer, step=2, averages=average)
        assert list(open_newest(where).tensors)[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for copies in (False, True):
            fresh = made()
            fresh[2].forward = lambda rows: rows
            again, state, mean = trained(DistributedDataParallel(fresh) if copies else fresh, 0)
            load(tmp_path, again, state, averages=mean)
            assert fresh[2].kept == {"rows": 4}
            for one, two in zip(wrapped.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(one, two)
                assert torch.equal(optimizer.state[one]["exp_avg"], state.state[two]["exp_avg"])
            for one, two in zip(average.parameters(), mean.parameters(), strict=True):
                assert torch.equal(one, two)
    finally:
        dist.destroy_process_group()
