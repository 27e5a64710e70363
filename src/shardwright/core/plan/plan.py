"""The plan: what follows from a layout, tensor by tensor. Frozen, and the one object that all layers of the code share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Literal

from shardwright.core.estimate.answer import Answer
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.auto import AutoChoice
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.mesh.hops import Beside, SubGroup
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.quantization.delayed import DelayedScale, DelayedTensor, delayed_scales, delayed_tensors
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.recipes.shown import recipe_json
from shardwright.core.resolution.gradients import Reduction
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import AxisRequest
from shardwright.core.resolution.row_order import in_order, row_chunks
from shardwright.core.stages.planned import Pipeline

Phase = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan(HashedOnce):
    """One row of the plan. ``num`` layers share it; shape, specs and bytes are those of one of them.

    ``at_rest`` is None for an activation. A weight's ``dtype`` is the one at rest. ``shape``: in memory; ``unpadded``: where
    that is padded, the shape without padding, as checkpoints have it. ``in_update``: how a weight's gradient and what the optimizer
    keeps for it are sharded; None where no axis of the layout shards them in another way than weights.
    """

    name: str
    kind: Literal["weight", "activation"]
    component: str
    shape: tuple[int, ...]
    dtype: str
    at_rest: Spec | None
    in_use: Spec
    bytes_per_device: int
    num: int
    shard_group: tuple[str, ...]
    replica_group: tuple[str, ...]
    gradient: Mapping[str, Reduction] = field(default_factory=dict)
    axis_requests: tuple[AxisRequest, ...] = ()
    stack: str | None = None
    unpadded: tuple[int, ...] | None = None
    in_update: Spec | None = None

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(
                self.name, self.num, self.shape, self.dtype, self.in_use, self.at_rest, self.bytes_per_device
            )

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.unpadded or self.shape

    @property
    def stacked_at_rest(self) -> Spec:
        """The spec of a weight at rest with its layers stacked along a leading dim, as JAX and checkpoints have it."""
        assert self.at_rest is not None
        return self._stacked(self.at_rest)

    @property
    def updated(self) -> Spec:
        """The spec of a weight's gradient, and of what the optimizer keeps for it, in the update."""
        found = self.in_update or self.at_rest
        assert found is not None
        return found

    @property
    def update_is_sharded(self) -> bool:
        """Whether axes shard the update of a weight and not the weight."""
        return self.updated != self.at_rest

    @property
    def stacked_updated(self) -> Spec:
        """The same with the layers stacked along a leading dim."""
        return self._stacked(self.updated)

    def _stacked(self, spec: Spec) -> Spec:
        if self.stack is None or spec.dims[0].logical_axis == "layers":
            return spec
        return spec.prefixed("layers")

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of a weight in memory with its layers stacked."""
        return self.shape if self.stack is None else (self.num, *self.shape)

    @property
    def stacked_saved_shape(self) -> tuple[int, ...]:
        """The shape of a weight in a checkpoint: its layers stacked, and no padding."""
        return self.saved_shape if self.stack is None else (self.num, *self.saved_shape)

    @property
    def spec(self) -> Spec:
        """The spec that reports show: at rest for a weight, in use for an activation."""
        return self.at_rest or self.in_use

    def to_json(self) -> dict[str, object]:
        data: dict[str, object] = {
            "name": self.name,
            "kind": self.kind,
            "component": self.component,
            "shape": list(self.shape),
            **({} if self.unpadded is None else {"unpadded_shape": list(self.unpadded)}),
            "dtype": self.dtype,
            "at_rest": None if self.at_rest is None else str(self.at_rest),
            "in_use": str(self.in_use),
            **({} if self.in_update is None else {"in_update": str(self.in_update)}),
            "bytes_per_device": self.bytes_per_device,
            "num": self.num,
            "shard_group": list(self.shard_group),
            "replica_group": list(self.replica_group),
            "gradient": dict(self.gradient),
        }
        if self.at_rest is None:
            del data["at_rest"]
        return data


def layers_on_device(request: Request, mesh: Mesh, tensor: TensorPlan) -> int:
    """How many of the layers that share a row one device stores and computes: all, or those of its pipeline stage."""
    return ceil(tensor.num / _stages(request.layout, mesh, tensor.component))


@lru_cache(maxsize=1024)
def _stages(layout: Layout, mesh: Mesh, component: str) -> int:
    """Into how many stages the axes of a component divide its layers."""
    return mesh.size(layout.axes_with("stage", component))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """A collective that the specs require, ``count_per_step`` times a step.

    ``bytes_per_device``: its operand or result on one device, whichever is larger, for one execution.
    ``seconds``: the sum over all executions of a step; None without chips. ``ragged``: an all-to-all with a different number
    of rows for each device; the bytes are those of all that a device sends. ``subgroup``: the groups inside one axis, where
    the collective is not over the entire axis. ``dtype``: of codes, scales, or both as bytes; None: that of the tensors.
    ``beside``, ``rearranged``, ``compiled_as``: as in ``Collective``.
    """

    component: str
    phase: Phase
    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    count_per_step: int
    tensors: tuple[str, ...]
    seconds: float | None = None
    ragged: bool = False
    subgroup: SubGroup | None = None
    dtype: str | None = None
    beside: tuple[Beside, ...] = ()
    rearranged: bool = False
    compiled_as: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "phase": self.phase,
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes_per_device": self.bytes_per_device,
            "count_per_step": self.count_per_step,
            "seconds": self.seconds,
            "tensors": list(self.tensors),
            **({"ragged": True} if self.ragged else {}),
            **({"group_size": self.subgroup.size} if self.subgroup else {}),
            **({"dtype": self.dtype} if self.dtype else {}),
            **({"at_once": 1 + len(self.beside)} if self.beside else {}),
            **({"compiled_as": self.compiled_as} if self.compiled_as else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device: exact, but an estimate of activations, on the host ``host_bytes``. ``narrowed_bytes``: by which codes at rest are less than weights."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    average_bytes: int = 0
    amax_history_bytes: int = 0
    host_bytes: int = 0
    narrowed_bytes: int = 0

    @property
    def total_bytes_per_device(self) -> int:
        return self.state_bytes + self.gradients_bytes + self.activations_bytes

    @property
    def state_bytes(self) -> int:
        """What a device holds between two steps."""
        return self.weights_bytes + self.optimizer_bytes + self.average_bytes + self.amax_history_bytes

    @property
    def saved_bytes(self) -> int:
        """What the first device of each tensor's replicas saves: the host memory of an asynchronous save for each device."""
        return self.state_bytes + self.narrowed_bytes

    def to_json(self) -> dict[str, int]:
        some = ("average_bytes", "amax_history_bytes", "host_bytes")
        return {
            **{name: getattr(self, name) for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes")},
            **{name: size for name in some if (size := getattr(self, name))},
            "activations_bytes": self.activations_bytes,
            "total_bytes_per_device": self.total_bytes_per_device,
            "saved_bytes": self.saved_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that follows from a request. ``sizes``: elements along each logical axis of activations. ``quantized``: the
    weights whose products are quantized; none without a recipe. ``answer``: whether it fits its chips and how fast it is; None without.

    ``pipeline``: its stages, where an axis divides the layers; ``stage_plans``: a plan of each, for one microbatch; ``ends_plan``: of the
    ends that all stages share. Then ``memory`` is that of the fullest rank, and ``collectives`` are those of the slowest. ``program``: on
    JAX, whose program is that of all stages, a plan of what each device has of one: both ends, and of each stack as many layers as the
    stage that has the most."""

    request: Request
    mesh: Mesh
    sizes: Mapping[str, int]
    tensors: tuple[TensorPlan, ...]
    collectives: tuple[PlannedCollective, ...]
    memory: Memory
    choices: tuple[AutoChoice, ...]
    findings: tuple[Finding, ...]
    step: StepCost | None = None
    answer: Answer | None = None
    quantized: tuple[QuantizedWeight, ...] = ()
    pipeline: Pipeline | None = None
    stage_plans: tuple[Plan, ...] = ()
    ends_plan: Plan | None = None
    program: Plan | None = None
    weights: tuple[TensorPlan, ...] = field(init=False, repr=False, compare=False)
    activations: tuple[TensorPlan, ...] = field(init=False, repr=False, compare=False)
    by_name: Mapping[str, TensorPlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # All are read many thousand times in a plan.
        by_kind: dict[str, list[TensorPlan]] = {"weight": [], "activation": []}
        for tensor in self.tensors:
            by_kind[tensor.kind].append(tensor)
        object.__setattr__(self, "weights", tuple(by_kind["weight"]))
        object.__setattr__(self, "activations", tuple(by_kind["activation"]))
        object.__setattr__(self, "by_name", {tensor.name: tensor for tensor in self.tensors})

    @property
    def delayed(self) -> tuple[DelayedScale, ...]:
        """The tensors with delayed amaxes; none without such a recipe."""
        return delayed_scales(self.request, self.quantized)

    @property
    def delayed_tensors(self) -> tuple[DelayedTensor, ...]:
        """What a run keeps for them."""
        recipe = self.request.precision
        return tuple(delayed_tensors(None if recipe is None else recipe.history, self.delayed))

    @property
    def dp(self) -> tuple[str, ...]:
        """The axes that shard batch in ``input``, and so decide which rows a device reads."""
        return self.request.layout.axes_sharding("batch", "input")

    @property
    def cp(self) -> tuple[str, ...]:
        """The axes that shard length in ``input``, and so decide which tokens of a row a device reads."""
        return self.request.layout.axes_sharding("length", "input")

    @property
    def row_chunks(self) -> tuple[int, ...]:
        """For each of the equal chunks of a row in the arrays, its number in the text."""
        return row_chunks(self.request.layout, self.mesh, load_balanced=self.request.load_balanced)

    @property
    def rows_in_order(self) -> bool:
        """Whether a row has the same order in the arrays as in the text."""
        return in_order(self.request.layout, self.mesh, load_balanced=self.request.load_balanced)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which the loss and the count of valid tokens are summed."""
        return self.mesh.in_mesh_order((*self.dp, *self.cp))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The errors that a layout has under any engine: all except those of what the engine does not run."""
        return tuple(finding for finding in self.errors if finding.code != NOT_RUN)

    def dump(self) -> str:
        """The resolved layout, one line a tensor in the notation: kind, name, at rest, and ``->`` in use for weights."""
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        lines = []
        for tensor in self.tensors:
            in_use = f"  ->  {tensor.in_use}" if tensor.at_rest is not None else ""
            lines.append(f"{tensor.kind:<10}  {tensor.name:<{width}}  {tensor.spec}{in_use}")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, object]:
        """The JSON contract of ``plan``."""
        request = self.request
        return {
            "model": request.table.name,
            "layout": request.layout.name,
            "mesh": dict(self.mesh.shape),
            "links": {axis.name: axis.link for axis in self.mesh.axes if axis.link is not None},
            "engine": request.engine,
            "batch": request.batch,
            "length": request.length,
            "load_balanced": request.load_balanced,
            "dtype": request.dtype,
            **({} if request.optimizer == ADAMW else {"optimizer": request.optimizer.text}),
            **{
                name: value
                for name in ("master_dtype", "gradients_dtype", "average")
                if (value := getattr(request, name)) is not None
            },
            **({} if request.loss_chunks == 1 else {"loss_chunks": request.loss_chunks}),
            **({} if request.precision is None else {"precision": self._precision_json()}),
            "num_parameters": request.table.num_parameters,
            **({"training_only": [row.to_json() for row in rows]} if (rows := request.table.training_only) else {}),
            "groups": {"dp": list(self.dp), "cp": list(self.cp), "loss": list(self.loss_axes)},
            "roles": {axis: dict(entry.roles) for axis, entry in request.layout.entries.items()},
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "collectives": [collective.to_json() for collective in self.collectives],
            "memory": self.memory.to_json(),
            "answer": None if self.answer is None else self.answer.to_json(),
            "step": None if self.step is None else self.step.to_json(),
            **({} if self.pipeline is None else {"pipeline": self.pipeline.to_json()}),
            "choices": [choice.to_json() for choice in self.choices],
            "findings": [finding.to_json() for finding in worst_first(self.findings)],
        }

    def _precision_json(self) -> dict[str, object]:
        assert self.request.precision is not None
        return {
            **recipe_json(self.request.precision),
            "free": all(weight.free for weight in self.quantized),
            "weights": [weight.to_json() for weight in self.quantized],
        }
