"""What waits before the steps of an optimizer: a save that still copies what a step changes."""

from __future__ import annotations

import weakref

from shardwright.engine_torch.own_program.holding import Optimizers, optimizers_in
from shardwright.runs.background import Saver


class BeforeSteps:
    """While this object exists, each step of an optimizer, or of each of several, first waits until the state that ``saver`` saves is
    copied."""

    def __init__(self, optimizer: Optimizers, saver: Saver) -> None:
        optimizers, saves = optimizers_in(optimizer), weakref.ref(saver)
        self._optimizers = tuple(map(weakref.ref, optimizers))

        def wait(*_: object) -> None:
            if (one := saves()) is not None:
                one.wait_copied()

        for one in optimizers:
            weakref.finalize(self, one.register_step_pre_hook(wait).remove)

    def of(self, optimizer: Optimizers) -> bool:
        """Whether these are the optimizers, also where a list of them is another one."""
        optimizers = optimizers_in(optimizer)
        return len(optimizers) == len(self._optimizers) and all(
            held() is one for held, one in zip(self._optimizers, optimizers, strict=True)
        )
