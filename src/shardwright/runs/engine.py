"""What a run asks of an engine, and what an engine tells of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.checkpoint import Checkpoint, OwnedBox, TensorInfo
from shardwright.data import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Of one step: mean loss over valid tokens, global norm of the gradients before clipping, valid tokens.

    ``dropped``: choices of an expert that its capacity had no place for. ``overflow``: choices that a buffer of the
    layout's had no room for, in all layers; where it is not 0, the step is not that of the model. All are of the whole
    step, the same in every process.
    """

    loss: float
    grad_norm: float
    tokens: int
    dropped: int = 0
    overflow: int = 0


class Engine(Protocol):
    """One plan, trained by one framework on the devices of this process; it holds the state of the run.

    Made before anything is read or allocated, by a function that raises InputError for a plan which the engine does not run
    and for devices that are not there. Then ``begin``, ``prepare`` and the steps are called in this order, each once, but for
    ``begin`` where a checkpoint turns out to be damaged, in any process; ``tensors`` and ``boxes`` between two steps.
    """

    @property
    def versions(self) -> Mapping[str, str]:
        """Those of the framework, which must be the same in all processes: ``{"jax": "0.10.2"}``."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """The rows of a step that this process reads, counted from the step's first row, ascending."""
        ...

    def begin(self, checkpoint: Checkpoint | None, seed: int) -> int:
        """Make the initial values that ``seed`` gives, or read the state of a checkpoint; the number of steps done.

        Raises CheckpointError for a tensor that is missing, extra, mis-shaped or mis-typed, DamagedError for damaged bytes.
        """
        ...

    def prepare(self) -> None:
        """Compile the step, where there is something to compile."""
        ...

    def step(self, batch: Batch) -> StepMetrics:
        """Train one step on the rows of ``offsets``, and wait until it is done."""
        ...

    def tensors(self) -> Sequence[TensorInfo]:
        """Every tensor of the state as a checkpoint names it; the same in all processes."""
        ...

    def boxes(self) -> Iterator[OwnedBox]:
        """This process's own boxes of these tensors: over all processes each distinct box once."""
        ...
