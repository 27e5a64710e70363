"""Training on PyTorch: the engine of a run, with one rank in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.checkpoint import OwnedBox, TensorInfo
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.gate import require_trained
from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.kernels import NEWEST, Device
from shardwright.data import Batch
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.precision.kernels import product_device
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.processes import alone, connection_of, device_of
from shardwright.engine_torch.training.state import (
    State,
    boxes_of,
    delayed_boxes,
    initial_state,
    load_state,
    tensors_of,
    weight_replicas,
)
from shardwright.engine_torch.training.step import TrainStep, train_step
from shardwright.runs import HeldReplica, OpenFolder, StepMetrics, Weights, run
from shardwright.training.optimizer import optimizer_options
from shardwright.training.options import Listener, RunOptions, RunOutcome


def train(
    options: RunOptions, plan: Plan, shown: Listener | None = None, *, open_folder: OpenFolder | None = None
) -> RunOutcome:
    """Train as the plan says, from the start or from the newest checkpoint under ``options.out``; see ``runs.run``.

    Each rank of the mesh is a process; ``options.processes`` has the index of this one.
    """
    require_trained(plan)
    count = 1 if options.processes is None else options.processes.count
    if count != plan.mesh.num_devices:
        raise InputError(
            f"the mesh {plan.mesh} has {plan.mesh.num_devices} devices, and there are {count} "
            f"{'process' if count == 1 else 'processes'}: PyTorch trains with one process per device. Give --mesh sizes that "
            f"multiply to {count}, or start {plan.mesh.num_devices}."
        )
    processes, connection = connection_of(options.processes)
    if shown is not None and (processes is None or processes.index == 0):
        for line in lacking_kernels(plan, product_device("cuda" if torch.cuda.is_available() else "cpu")):
            shown.say(line)
    with alone() if processes is None else nullcontext():
        return run(
            replace(options, processes=processes),
            plan,
            shown,
            connection=connection,
            make_engine=TorchEngine,
            open_folder=open_folder,
        )


def lacking_kernels(plan: Plan, device: Device) -> Sequence[str]:
    """A line for each kernel of codes that the device has and this build of PyTorch lacks: the plan takes it, and the step multiplies values."""
    newest = replace(device, cuda=NEWEST, of_experts=True)
    reasons = {
        chosen.why: chosen.name
        for weight in plan.quantized
        for product, chosen in weight.kernels_on(device, "torch", plan.request.dtype).items()
        if not chosen.kernel.of_codes
        and weight.kernels_on(newest, "torch", plan.request.dtype)[product].kernel.of_codes
    }
    return [
        f"products of codes are products of {kernel} here, many times slower: {why}" for why, kernel in reasons.items()
    ]


class TorchEngine:
    """One rank of a plan, trained by PyTorch; an ``Engine``. Raises FindingsError for a plan with errors."""

    def __init__(self, options: RunOptions, plan: Plan) -> None:
        require_trained(plan)
        self.options, self.plan = options, plan
        self._device = device_of(dist.get_rank())
        self._feed = feed_of(plan, dist.get_rank(), self._device)
        self._model: Model | None = None
        self._state: State | None = None
        self._step: TrainStep = train_step(plan, optimizer_options(options), options.seed)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    @property
    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None

    @property
    def offsets(self) -> Sequence[int]:
        return self._feed.offsets

    def begin(self, checkpoint: Weights | None, seed: int, *, weights_only: bool = False) -> int:
        # Free a state from a checkpoint that another rank found damaged, before the next checkpoint is read.
        self._state = None
        # All ranks make its process groups at the same time, once.
        if self._model is None:
            ranks = ranks_of(self.plan, self._device)
            self._model = Model(self.plan, ranks)
        if checkpoint is None:
            self._state = initial_state(self._model, seed)
        else:
            self._state = load_state(self._model, checkpoint, weights_only=weights_only)
        return self._state.step

    def prepare(self) -> None:
        """There is nothing to compile."""

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        assert self._state is not None
        return self._step(self._state, self._feed.on_device(batch.arrays), before_update)

    def tensors(self) -> Sequence[TensorInfo]:
        return tensors_of(self.plan)

    def boxes(self) -> Iterator[OwnedBox]:
        assert self._state is not None
        return boxes_of(self._state)

    def replicas(self) -> Iterator[OwnedBox]:
        assert self._state is not None
        return delayed_boxes(self._state)

    def weight_replicas(self) -> Iterator[HeldReplica]:
        assert self._state is not None
        return weight_replicas(self._state)
