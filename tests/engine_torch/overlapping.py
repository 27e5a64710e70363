"""Programs that go on while their state is copied, and copies that begin as late as they can."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.checkpoint import CheckpointError, OwnedBox
from shardwright.checkpoint.writing.copies import HostCopies
from shardwright.engine_torch import Saver, save
from tests.engine_torch.own_saved import sharded, stepped

WAIT_S = 60
"""For what takes milliseconds on a machine that does nothing else."""
STEPS = 3


class Late:
    """Copies of what lasts until the update begin only after ``go``; and a moment later, so that a step which does not wait is first."""

    def __init__(self) -> None:
        self.go, self.stepped = threading.Event(), threading.Event()

    @contextmanager
    def copies(self) -> Iterator[Late]:
        copy = HostCopies._copy

        def late(copies: HostCopies, owned: OwnedBox) -> np.ndarray:
            if owned.lasts == "until the update":
                assert self.go.wait(WAIT_S), "the program waited for a copy of what lasts longer"
                self.stepped.wait(0.01)
            return copy(copies, owned)

        patch = pytest.MonkeyPatch()
        patch.setattr(HostCopies, "_copy", late)
        try:
            yield self
        finally:
            patch.undo()


class Normed(nn.Module):
    """Its forward pass changes buffers, and a parameter that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 14), nn.BatchNorm1d(14), nn.Linear(14, 6)
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.data += 1
        return self.down(self.norm(self.up(rows)))


def trained(folder: Path, late: Late | None) -> None:
    """A program that saves after every step: in the background where its copies are late, and at once where they are not."""
    torch.manual_seed(0)
    module = Normed()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    averages = torch.optim.swa_utils.AveragedModel(module)
    saver = None if late is None else Saver(folder, overlap=True)
    for step in range(1, STEPS + 2):
        module(torch.randn(8, 6)).square().mean().backward()
        if late is not None:
            late.go.set()
        optimizer.step()
        optimizer.zero_grad()
        if late is not None:
            late.stepped.set()
        if step > STEPS:
            break
        if saver is None:
            save(folder, module, optimizer, step=step, averages=averages, values={"rows": 8 * step})
        else:
            assert late is not None
            saver.check()
            late.go.clear()
            late.stepped.clear()
            saver.save(module, optimizer, step=step, averages=averages, values={"rows": 8 * step})
        averages.update_parameters(module)
    if saver is not None:
        saver.wait()


def save_small_overlapping(kind: str, sizes: tuple[int, ...], folder: str) -> None:
    """As ``own_saved.save_small``; a step with gradients begins while nothing of the parameters is copied."""
    module = sharded(kind, sizes)
    optimizer = stepped(module)
    with Late().copies() as late, Saver(folder, overlap=True) as saver:
        saver.save(module, optimizer, step=1, values={"next_row": 8})
        module(torch.arange(13)).sum().backward()
        optimizer.param_groups[0]["lr"] = 1.0
        late.go.set()
        optimizer.step()
        late.stepped.set()
        saver.check()


def changed_without_waiting(kind: str, sizes: tuple[int, ...], folder: str) -> str:
    """The error of a save whose parameters are changed before they are copied."""
    module = sharded(kind, sizes)
    saver = Saver(folder, overlap=True)
    with Late().copies() as late:
        saver.save(module, step=1)
        with torch.no_grad():
            module.get_parameter("up.weight").mul_(2)
        late.go.set()
        late.stepped.set()
        try:
            saver.wait()
        except CheckpointError as error:
            return str(error)
    return ""
