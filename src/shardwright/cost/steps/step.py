"""Seconds of one step, from the plan's collectives and the flops of a device.

| communication | overlaps with |
|---|---|
| gathers of weights, reductions of their gradients | the compute of the same component in the same phase |
| those of experts' matrices in XLA's programs for GPUs | a part (``OF_A_LOOP``): one loop multiplies by all three matrices, so they run beside the other products of a layer, or beside none |
| those of ``fully_shard`` in PyTorch | the compute of all components of a layer: it gathers the next layer while one computes |
| a ring's permutes | the compute of the same component in the same phase |
| on TPUs, gathers and scatters of tensor parallelism | the same: the compiler splits the products with them |
| the same on GPUs, where a file of numbers has ``overlap`` | the same: kernels send while they multiply |
| exchanges of tokens with experts, where a file of numbers has ``overlap`` for them | the compute of all components: while one microbatch's tokens are sent, another's are multiplied |
| reductions over replicas, once a step | nothing: they run after the last product. On PyTorch those of ``fully_shard`` run beside the backward pass of the last microbatch |
| the same, and gathers of updated weights, where ``overlap`` has ``data`` | one microbatch's backward and forward pass: of the last, and of the first of the next step |
| any other collective of activations | nothing: the next product waits for it |
| copies of activations to the host | the forward pass |
| copies back | the backward pass and what it makes again. On PyTorch nothing: each begins where it is needed |

Hidden communication is free, but where a chip has ``hidden_cost_share``: kernels of collectives take that share of their time from the products beside
them. On AMD's it was measured. On NVIDIA's ``kernels_share`` has it: as a term of its own it made published steps worse (docs/cost.md).

The time of a step is the sum of the compute (``precision.py``), the passes of optimizer and quantizers through memory, the exposed
communication and the exposed copies. That of a pipeline is its timetable's on a clock (``pipeline.py``). Of a user's own program no stages are known; its
bubble is (stages - 1) / microbatches of the others (book, Training).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from shardwright.core.estimate.step_cost import Constant, StepCost
from shardwright.core.plan.plan import Phase, Plan, PlannedCollective
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, Time, time_of_planned
from shardwright.cost.steps.copies import with_copies
from shardwright.cost.steps.flops import Work, step_flops, update_bytes
from shardwright.cost.steps.precision import (
    computing_seconds,
    kernels_of,
    moving_seconds,
    program_of,
    quantization_bytes,
)
from shardwright.cost.steps.products import RATES
from shardwright.cost.steps.routing import EVEN, is_of_experts, once_share, sent_times

HOST_RATE = "host_bytes_per_s"

OF_A_LOOP: Mapping[Phase, float] = {"forward": 1.0, "recompute": 2 / 3, "backward": 1 / 3}
"""The share of the bytes of experts' matrices and of their gradients that XLA sends beside a product of the layer, where the experts'
products are one loop over blocks of rows: in the program for an H100 of Mixtral 8x7B under ``ep``, ``--move moe=weights`` (docs/cost.md)."""

LOOP = "the loop of experts"
"""Stands for a component: of the collectives of its matrices that are sent beside other products."""

EXCHANGE = "the exchange of tokens"
"""Stands for a component: of one microbatch's exchanges that are sent beside the products of another."""

LAYER = "a layer"
"""Stands for all components of a layer: of what ``fully_shard`` gathers and reduces beside them."""

Times = Sequence[Time | None]
"""The time of one execution of each collective of a plan, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The times of a plan with one reading of the hardware's numbers."""

    times: Times
    step: StepCost | None


def timed(plan: Plan, mapping: MeshMapping, reading: Reading = "used", shares: float = EVEN) -> Timed:
    """The times of a plan on a machine; ``step`` is None if a collective has no time. ``shares``: of experts' rows (``routing.py``)."""
    chip = mapping.machine.numbers
    assert chip is not None
    times = times_of(plan, mapping, reading)
    return Timed(times=times, step=_step(plan, times, chip, reading, shares))


def times_of(plan: Plan, mapping: MeshMapping, reading: Reading = "used") -> Times:
    """The times of the collectives of a plan."""
    chip = mapping.machine.numbers
    assert chip is not None
    rates = Rates.of(chip, reading)
    return tuple(time_of_planned(one, mapping, rates) for one in plan.collectives)


def to_host_seconds(plan: Plan, chip: ChipNumbers, reading: Reading = "used") -> float | None:
    """Seconds of the copies of a step's activations to the host, and as long again back; None if no source was checked for the link."""
    if not plan.memory.host_bytes:
        return 0.0
    if HOST_RATE not in chip.numbers:
        return None
    return plan.memory.host_bytes * plan.request.microbatches / chip.read(HOST_RATE, reading)


def seconds_of(one: PlannedCollective, time: Time | None) -> float | None:
    """Seconds of all its executions in a step."""
    return None if time is None else time.seconds * one.count_per_step


def all_seconds(plan: Plan, times: Times, chip: ChipNumbers, shares: float = EVEN) -> list[float | None]:
    """Those of each collective of a plan. ``shares``: of experts' rows (``routing.py``)."""
    found = (seconds_of(one, time) for one, time in zip(plan.collectives, times, strict=True))
    return [
        second and second * sent_times(plan, one, shares) * (once_share(plan, one) if chip.tokens_once else 1.0)
        for one, second in zip(plan.collectives, found, strict=True)
    ]


def constants_of(chip: ChipNumbers, plan: Plan) -> tuple[Constant, ...]:
    """The numbers of a chip that the time of a step depends on, each with those of other sources."""
    dtype, kernels = (
        plan.request.dtype,
        (kernels_of(plan, weight, chip) for weight in plan.quantized),
    )
    needed = {RATES[one.kernel.rate] for of_weight in kernels for one in of_weight.values()} | {RATES["bfloat16"]}
    names = [
        name
        for name in chip.numbers
        if name.endswith(("_per_s", "_latency_s", "_share"))
        and _is_used(name, needed, plan.request.engine)
        and (name != HOST_RATE or plan.memory.host_bytes)
    ]
    if dtype == "float32":
        names.append("float32_share_of_bf16")
    return tuple(
        Constant(
            name=name,
            value=chip.numbers[name].used.value,
            source=chip.numbers[name].used.text,
            others=tuple((other.value, other.text) for other in chip.numbers[name].others),
        )
        for name in names
    )


def _is_used(name: str, rates: set[str], engine: str) -> bool:
    if "attention" in name:
        return name.startswith(("attention", f"{engine}_"))
    return name.removeprefix("product_") in rates or name.removeprefix("product_") not in RATES.values()


def _step(plan: Plan, times: Times, chip: ChipNumbers, reading: Reading, shares: float) -> StepCost | None:
    seconds = all_seconds(plan, times, chip, shares)
    known = [second for second in seconds if second is not None]
    computing = computing_seconds(plan, chip, reading, shares)
    if len(known) < len(seconds) or computing is None:
        return None
    phases = phase_times(plan, known, with_copies(computing, plan, chip, reading), chip, reading)
    moved = update_bytes(plan) + quantization_bytes(plan, chip, shares)
    compute = sum(one.compute for one in phases.values()) + moving_seconds(chip, moved, reading)
    compute += chip.step_latency_s
    exposed = sum(one.exposed for one in phases.values())
    to_host, waiting = to_host_seconds(plan, chip, reading), sum(one.host_exposed for one in phases.values())
    idle = _bubble_ratio(plan) * (compute + exposed + waiting)
    return StepCost(
        seconds=compute + exposed + waiting + idle,
        compute_seconds=compute,
        communication_seconds=sum(known),
        exposed_seconds=exposed,
        host_seconds=None if to_host is None else 2 * to_host,
        host_exposed_seconds=waiting,
        idle_seconds=idle,
        flops_per_device=sum(step_flops(plan).values()),
        constants=constants_of(chip, plan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Seconds of a phase on one device. ``exposed``, ``host_exposed``: the communication, and the copies to or from the host, that are not
    hidden behind products. ``hideable``: the communication that may be, if there are products enough."""

    compute: float = 0.0
    communication: float = 0.0
    hideable: float = 0.0
    exposed: float = 0.0
    host_exposed: float = 0.0


def phase_times(
    plan: Plan, seconds: Sequence[float], computing: Work, chip: ChipNumbers, reading: Reading
) -> Mapping[Phase, PhaseTime]:
    """Each phase of a step. ``seconds``: of all executions of each collective of the plan, in its order. ``computing``: of the products of
    each component and phase."""
    weights = {tensor.name for tensor in plan.weights}
    hideable: dict[tuple[str, Phase], float] = {}
    open_seconds: dict[Phase, float] = {}
    communication: dict[Phase, float] = {}
    for one, second in zip(plan.collectives, seconds, strict=True):
        communication[one.phase] = communication.get(one.phase, 0.0) + second
        of_weights = one.phase != "update" and weights.issuperset(one.tensors)
        if of_weights and _of_a_loop(plan, chip, one):
            hidden = OF_A_LOOP[one.phase]
            hideable[LOOP, one.phase] = hideable.get((LOOP, one.phase), 0.0) + hidden * second
            open_seconds[one.phase] = open_seconds.get(one.phase, 0.0) + (1 - hidden) * second
        elif (
            one.kind == "permute"
            or of_weights
            or _inside_products(plan, chip, one)
            or _inside_backward(plan, chip, one)
        ):
            pooled = plan.request.properties.gathers_together or one.phase == "update"
            where = LAYER if pooled and _is_of_layers(plan, one) else one.component, one.phase
            hideable[where] = hideable.get(where, 0.0) + second
        elif one.ragged and "expert" in chip.overlap:
            hideable[EXCHANGE, one.phase] = hideable.get((EXCHANGE, one.phase), 0.0) + second
        else:
            open_seconds[one.phase] = open_seconds.get(one.phase, 0.0) + second
    # In the order of the table: a sum of seconds has the same last bit in every process.
    of_layers = dict.fromkeys(row.component for row in plan.weights if row.stack is not None)

    def left(component: str, phase: Phase) -> float:
        """The compute beside which a component's collectives run, without that which others hide behind."""
        if component != LAYER:
            return max(0.0, computing.get((component, phase), 0.0) - hideable.get((component, phase), 0.0))
        return max(0.0, sum(computing.get((of, phase), 0.0) - hideable.get((of, phase), 0.0) for of in of_layers))

    behind: dict[tuple[str, Phase], float] = dict(computing)
    for component, phase in hideable:
        if phase == "update":
            # What the last microbatch's backward pass leaves of its time is for the sums over replicas that run beside it.
            passes: Sequence[Phase] = ("backward", "forward") if "data" in chip.overlap else ("backward",)
            gathered = sum(hideable.get((LAYER, of), 0.0) for of in passes) if component == LAYER else 0.0
            free = max(0.0, sum(left(component, of) for of in passes) - gathered)
            behind[component, phase] = free / plan.request.microbatches
        elif component == LAYER:
            behind[component, phase] = left(component, phase)
        elif component in ("residual", LOOP, EXCHANGE):
            # What shards the residual stream is gathered for the products of the other components, and scattered after them. Tokens are
            # exchanged beside all products of another microbatch.
            itself = "moe" if component == LOOP else component
            others = dict.fromkeys(of for of, when in computing if when == phase and of != itself)
            behind[component, phase] = computing.get((component, phase), 0.0) + max(
                0.0, sum(left(of, phase) for of in others) - hideable.get((LAYER, phase), 0.0)
            )
    lost = chip.read("hidden_cost_share") if "hidden_cost_share" in chip.numbers else 0.0
    phases: Iterable[Phase] = get_args(Phase)
    compute = {phase: sum(time for (_, of), time in computing.items() if of == phase) for phase in phases}
    copies = to_host_seconds(plan, chip, reading) or 0.0
    beside = compute["recompute"] + compute["backward"] if plan.request.properties.returns_copies_beside else 0.0
    waiting: Mapping[Phase, float] = {"forward": copies - compute["forward"], "backward": copies - beside}
    return {
        phase: PhaseTime(
            compute=compute[phase],
            host_exposed=max(0.0, waiting.get(phase, 0.0)),
            communication=communication.get(phase, 0.0),
            hideable=sum(second for (_, of), second in hideable.items() if of == phase),
            exposed=open_seconds.get(phase, 0.0)
            + sum(
                second - (1.0 - lost) * min(second, behind.get(where, 0.0))
                for where, second in hideable.items()
                if where[1] == phase
            ),
        )
        for phase in phases
    }


def _is_of_layers(plan: Plan, one: PlannedCollective) -> bool:
    rows = plan.by_name
    return all(name in rows and rows[name].kind == "weight" and rows[name].stack is not None for name in one.tensors)


def _of_a_loop(plan: Plan, chip: ChipNumbers, one: PlannedCollective) -> bool:
    """Whether a collective is of matrices that a loop over blocks multiplies by: in XLA's programs for GPUs, of experts."""
    in_blocks = chip.network != "torus" and plan.request.properties.static_rows and program_of(plan, chip) == "compiled"
    return in_blocks and all(is_of_experts(plan, name) for name in one.tensors)


def _inside_backward(plan: Plan, chip: ChipNumbers, one: PlannedCollective) -> bool:
    """Whether gradients are summed over replicas beside the backward pass of the last microbatch: by ``fully_shard``, or where the chips'
    file says so."""
    if one.phase != "update":
        return False
    rows = plan.by_name
    if "data" in chip.overlap:
        return all(name in rows and rows[name].kind == "weight" for name in one.tensors)
    if not plan.request.properties.reduces_replicas_early:
        return False
    return all(name in rows and rows[name].kind == "weight" and rows[name].shard_group for name in one.tensors)


def _inside_products(plan: Plan, numbers: ChipNumbers, one: PlannedCollective) -> bool:
    """Whether a collective is split together with a product that needs or makes its tensor, so that both run at once: gathers and scatters
    of tensor parallelism, by a TPU's compiler or where the chips' file says so."""
    chip, layout = plan.request.chip, plan.request.layout
    return (
        ((chip is not None and chip.accelerator == "TPU") or "tensor" in numbers.overlap)
        and one.kind in ("all-gather", "reduce-scatter")
        and all(layout.role(axis, one.component) == "tensor" for axis in one.axes)
    )


def _bubble_ratio(plan: Plan) -> float:
    """The bubble of a pipeline without a timetable, as a share of the compute and exposed communication of a step."""
    stages = plan.mesh.size(plan.request.layout.axes_with("stage", "residual"))
    return (stages - 1) / plan.request.microbatches
