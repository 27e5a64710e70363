"""The interface of an engine to a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.data import Batch
from shardwright.runs.metrics.records import StepMetrics
from shardwright.runs.processes.replicas import HeldReplica
from shardwright.storage.url import Place
from shardwright.training.partial import PartialWeights


class Reads(Protocol):
    """What an engine reads boxes from."""

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> Sequence[Any]:
        """As ``Checkpoint.read_boxes``: an array of NumPy for each box, in its shape."""
        ...


class Weights(Protocol):
    """The weights that a run begins with, in boxes of our tensors: a checkpoint, or a model folder of another program."""

    @property
    def directory(self) -> Place: ...
    @property
    def point(self) -> RunPoint: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def expect(self, wanted: Mapping[str, tuple[Sequence[int], str]], *, unread: tuple[str, ...] = ()) -> None:
        """As ``Checkpoint.expect``."""
        ...

    def stored(self, name: str) -> Stored:
        """As ``Checkpoint.stored``: the boxes of which one is read at a time."""
        ...

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> list[Any]:
        """As ``Checkpoint.read_boxes``: an array of NumPy for each box, in its shape."""
        ...

    def read_into(self, name: str, targets: Sequence[tuple[Box, Any]]) -> None:
        """As ``Checkpoint.read_into``."""
        ...


OpenFolder = Callable[[Place, Plan, PartialWeights], tuple[Weights, Sequence[str]] | None]
"""The weights of a folder that is no checkpoint, in the dtypes of a plan, with lines to show; None for another kind of folder.

Weights that are new are not among its tensors."""


class Engine(Protocol):
    """One plan, trained by one framework on the devices of this process; it holds the state of the run.

    It is made before anything is read or allocated, by a function that raises FindingsError for a plan that the engine does
    not run, and InputError for missing devices. Then ``begin``, ``prepare`` and the steps are called in this order. ``begin`` is called again
    where any process finds a checkpoint damaged. ``tensors``, ``boxes`` and both kinds of replicas are called between two steps.
    """

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the framework, which must be the same in all processes: ``{"jax": "0.10.2"}``."""
        ...

    @property
    def device_name(self) -> str:
        """A device of this process, by the name that its driver gives; ``cpu`` for the host."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """The rows of a step that this process reads, counted from the step's first row, ascending."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that a device of this process has held until now; None where the framework does not say it."""
        ...

    def begin(self, checkpoint: Weights | None, seed: int, *, weights_only: bool = False) -> int:
        """Make the initial values of ``seed``, or read the state of a checkpoint. Returns the number of steps done.

        With ``weights_only``, only its weights are read: moments are zero, and no step is done.

        Raises CheckpointError for a tensor that is missing, extra, mis-shaped or mis-typed, DamagedError for damaged bytes.
        """
        ...

    def prepare(self) -> None:
        """Compile the step, where the framework compiles one."""
        ...

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        """Train one step on the rows of ``offsets``, and wait until it is done.

        ``before_update`` is called once, before anything changes of the boxes that last until the update.
        """
        ...

    def tensors(self) -> Sequence[TensorInfo]:
        """Every tensor of the state by its name in checkpoints; the same in all processes."""
        ...

    def boxes(self) -> Iterator[OwnedBox]:
        """The boxes of these tensors that this process writes. Over all processes, each distinct box occurs once."""
        ...

    def replicas(self) -> Iterator[OwnedBox]:
        """The boxes of what is kept for delayed amaxes, on each device of this process: equal wherever a box is held."""
        ...

    def weight_replicas(self) -> Iterator[HeldReplica]:
        """The boxes of weights that several devices hold, on each device of this process."""
        ...
