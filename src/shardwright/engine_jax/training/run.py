"""Training on JAX: the engine of a run, with its state on the devices of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from shardwright.checkpoint import OwnedBox, TensorInfo
from shardwright.core.plan.gate import require_trained
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import with_larger_buffers
from shardwright.core.resolution.token_hops import token_hops
from shardwright.data import Batch
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.feed import feed_of
from shardwright.engine_jax.training.processes import CONNECTION
from shardwright.engine_jax.training.snapshot import delayed_boxes, infos_of, load_state, own_boxes, weight_replicas
from shardwright.engine_jax.training.state import State, abstract_state, initial_state
from shardwright.engine_jax.training.step import abstract_batch, batch_sharding, train_step
from shardwright.runs import HeldReplica, OpenFolder, StepMetrics, Weights, run
from shardwright.training.optimizer import optimizer_options
from shardwright.training.options import Listener, RunOptions, RunOutcome

Arrays = State[jax.Array]


def train(
    options: RunOptions, plan: Plan, shown: Listener | None = None, *, open_folder: OpenFolder | None = None
) -> RunOutcome:
    """Train as the plan says, from the start or from the newest checkpoint under ``options.out``; see ``runs.run``."""
    return run(options, plan, shown, connection=CONNECTION, make_engine=JaxEngine, open_folder=open_folder)


class JaxEngine:
    """One plan, trained by JAX on the devices of this process; an ``Engine``.

    Raises FindingsError for a plan with errors, and InputError for too few devices.
    """

    def __init__(self, options: RunOptions, plan: Plan) -> None:
        require_trained(plan)
        self.options, self.plan = options, plan
        self._mesh = device_mesh(plan.mesh)
        self._feed = feed_of(plan, batch_sharding(plan, self._mesh))
        self._state: Arrays | None = None
        # Its buffers of experts' tokens may have grown.
        self._sized = plan
        self._step: jax.stages.Compiled | None = None
        self._compiling_bytes = self._program_bytes = 0

    @property
    def versions(self) -> Mapping[str, str]:
        return {"jax": jax.__version__}

    @property
    def device_name(self) -> str:
        return self._mesh.local_devices[0].device_kind

    @property
    def offsets(self) -> Sequence[int]:
        return self._feed.offsets

    @property
    def peak_bytes(self) -> int | None:
        return of_steps(self._most_bytes(), compiling=self._compiling_bytes, program=self._program_bytes)

    def _most_bytes(self) -> int | None:
        stats = (device.memory_stats() or {} for device in self._mesh.local_devices)
        return max((stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat), default=None)

    def begin(self, checkpoint: Weights | None, seed: int, *, weights_only: bool = False) -> int:
        # Free a state from a checkpoint that another process found damaged, before the next checkpoint is read.
        self._state = None
        if checkpoint is None:
            self._state = initial_state(self.plan, self._mesh, seed)
        else:
            self._state = load_state(checkpoint, self.plan, self._mesh, weights_only=weights_only)
        return int(self._state.step)

    def prepare(self) -> None:
        self._step = self._compiled()
        self._compiling_bytes = self._most_bytes() or 0
        memory = self._step.memory_analysis()
        self._program_bytes = 0 if memory is None else memory.peak_memory_in_bytes

    def _compiled(self) -> jax.stages.Compiled:
        step = train_step(self._sized, self._mesh, optimizer_options(self.options), self.options.seed)
        return step.lower(abstract_state(self.plan, self._mesh), abstract_batch(self.plan, self._mesh)).compile()

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        assert self._state is not None
        # The compiled step is given the state itself: nothing of it lasts any longer.
        before_update()
        rows, grown_rows = self._feed.on_devices(batch), None
        while True:
            assert self._step is not None
            self._state, arrays = self._step(self._state, rows)
            metrics = {name: np.asarray(value).item() for name, value in arrays._asdict().items()}
            if not metrics["overflow"] or self.plan.request.expert_buffer is not None:
                return StepMetrics(**metrics, grown_rows=grown_rows)
            self._sized = with_larger_buffers(self._sized)
            grown_rows = token_hops(self._sized.request, self._sized.mesh)[-1].buffer_rows
            self._step = None
            self.prepare()

    def tensors(self) -> Sequence[TensorInfo]:
        return infos_of(self.plan, self._mesh)

    def boxes(self) -> Iterator[OwnedBox]:
        assert self._state is not None
        return own_boxes(self._state, self.plan, self._mesh)

    def replicas(self) -> Iterator[OwnedBox]:
        assert self._state is not None
        return delayed_boxes(self._state)

    def weight_replicas(self) -> Iterator[HeldReplica]:
        assert self._state is not None
        return weight_replicas(self._state, self.plan, self._mesh)


def of_steps(held: int | None, *, compiling: int, program: int) -> int | None:
    """The most bytes that a device held in steps, of the most ever and the most until the step was compiled.

    XLA for GPUs tries kernels on the device while it compiles, and may take more for that than any step takes. Then the peak of the
    program counts, as its compiler reports it: a GPU allocates just that. ``program``: 0 where there is no such figure.

    >>> of_steps(30, compiling=25, program=21), of_steps(25, compiling=25, program=21)
    (30, 21)
    """
    compiled_in_more = held is not None and held <= compiling and 0 < program < held
    return program if compiled_in_more else held
