"""Saves whose copies go on while the program computes its next step: each is the step at its call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.checkpoint import open_checkpoint, verify
from shardwright.engine_torch import Saver, load
from shardwright.engine_torch.io.host import STAGE_BYTES, bits_of, copied_bits, now_on
from tests.engine_torch.overlapping import STEPS, Late, changed_without_waiting, save_small_overlapping, trained
from tests.engine_torch.own_saved import load_small
from tests.engine_torch.ranks import Ranks

CHANGED = (
    "was changed while it was copied, so this step cannot be saved. Saver(overlap=True) is for parameters that change only in the step of "
    "the optimizer that it is given: before any other change, call wait_copied()."
)


def test_each_save_is_that_of_a_program_that_stops_for_it(tmp_path: Path) -> None:
    trained(tmp_path / "stopping", None)
    with Late().copies() as late:
        trained(tmp_path / "going on", late)
    assert verify(tmp_path / "going on")["ok"]
    for step in range(1, STEPS + 1):
        place = f"checkpoints/step-{step:08d}"
        stopping, going_on = (open_checkpoint(tmp_path / name / place) for name in ("stopping", "going on"))
        assert going_on.point.metadata == stopping.point.metadata
        files = sorted(path.name for path in (tmp_path / "stopping" / place).glob("*.safetensors"))
        assert files
        for name in files:
            ours = (tmp_path / "going on" / place / name).read_bytes()
            assert ours == (tmp_path / "stopping" / place / name).read_bytes(), (step, name)


def test_ranks_go_on(four: Ranks, tmp_path: Path) -> None:
    ranks = four.first(3)
    ranks.run(save_small_overlapping, "fsdp", (3,), str(tmp_path))
    assert verify(tmp_path)["ok"]
    assert ranks.run(load_small, "fsdp", (3,), str(tmp_path)) == [[]] * 3


def test_a_change_that_nothing_waited_for_is_an_error(four: Ranks, tmp_path: Path) -> None:
    assert changed_without_waiting("replicated", (1,), str(tmp_path / "one")) == f"'up.weight' {CHANGED}"
    for found in four.first(2).run(changed_without_waiting, "fsdp", (2,), str(tmp_path / "two")):
        assert f"'up.weight' {CHANGED}" in found
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_program_that_changes_weights_by_itself_waits_for_their_copy(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with Late().copies() as late, Saver(tmp_path, overlap=True) as saver, torch.no_grad():
        for step in range(1, 4):
            module.weight.fill_(step)
            saver.save(module, step=step)
            late.go.set()
            saver.wait_copied()
            late.go.clear()
    for step in range(1, 4):
        load(tmp_path, module, step=step)
        assert (module.weight == step).all()


def test_another_optimizer_waits_too(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for _ in range(4)]
    with Saver(tmp_path, overlap=True) as saver:
        for step, optimizer in enumerate(optimizers, 1):
            with Late().copies() as late:
                saver.save(module, optimizer, step=step)
                module(torch.ones(1, 2)).sum().backward()
                late.go.set()
                optimizer.step()
                late.stepped.set()
                saver.check()
    assert len(verify(tmp_path)["checkpoints"]) == 4
    del saver
    optimizers[-1].step()


@pytest.mark.gpu
def test_a_gpu_copies_beside_its_work() -> None:
    device = torch.device("cuda")
    live = torch.randn(STAGE_BYTES // 4 + 1000, 3, device=device)
    for view in (lambda: live, lambda: live[7:-7, 1:], lambda: live.t(), lambda: live[:0], lambda: live[0, 0]):
        needed, earlier = bits_of(view()).copy(), None
        for _ in range(2):
            now = now_on(device)
            # What comes later in the program waits for the copy, not the copy for it.
            work = live @ torch.randn(3, 3, device=device)
            found = copied_bits(view, now, earlier)
            assert earlier is None or np.shares_memory(found, earlier) or not found.size
            assert (found.shape, found.tobytes()) == (needed.shape, needed.tobytes())
            earlier = found
            del work
