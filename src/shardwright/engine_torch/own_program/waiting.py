"""What waits before the steps of an optimizer: a save that still copies what a step changes."""

from __future__ import annotations

import weakref

import torch

from shardwright.runs.background import Saver


class BeforeSteps:
    """While this object exists, each step of an optimizer first waits until the state that ``saver`` saves is copied."""

    def __init__(self, optimizer: torch.optim.Optimizer, saver: Saver) -> None:
        self._optimizer, saves = weakref.ref(optimizer), weakref.ref(saver)

        def wait(*_: object) -> None:
            if (one := saves()) is not None:
                one.wait_copied()

        weakref.finalize(self, optimizer.register_step_pre_hook(wait).remove)

    def of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizer() is optimizer
