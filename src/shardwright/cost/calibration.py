"""Numbers of chips by measurements on them: what is measured for a plan, and what follows.

An engine measures products, attention, copies and collectives at the plan's sizes, all devices at once, and short runs of the model give
the seconds of steps with few layers. From these follow:

| number | from |
|---|---|
| rates of products, attention and copies | flops and bytes of the plan's own sizes over their seconds |
| rate of the links, latency of a collective | least squares: seconds = latency + seconds of the formulas x a factor |
| ``kernels_share`` | what one layer more takes, between two short runs |
| ``step_latency_s`` | what a short run takes besides |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.model.names import STREAM
from shardwright.core.plan.attention_kernels import LocalAttention, local_attention
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.cost.hardware.chips import CPU, ChipNumbers, Cited, Number
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.price import price
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.cost.steps.flops import step_products
from shardwright.cost.steps.precision import forward_shape
from shardwright.cost.steps.products import Shape
from shardwright.cost.steps.rings import NO_STEPS, RINGS

MOST = 6
"""Products and collectives of a plan that are measured: those that take the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is measured for a plan, on each device at once. ``copied``: elements of the array that is copied."""

    dtype: str
    products: tuple[Shape, ...]
    attention: LocalAttention | None
    copied: int
    collectives: tuple[PlannedCollective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one thing, several times. ``amount``: flops or bytes of it."""

    what: str
    size: str
    amount: float
    seconds: tuple[float, ...]

    @property
    def typical(self) -> float:
        return typical(self.seconds)

    @property
    def spread(self) -> float:
        """How far three of four repetitions were off at most, as a share."""
        off = sorted(abs(one / self.typical - 1) for one in self.seconds)
        return off[max(0, len(off) * 3 // 4 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """A run of the model with few layers: its plan, and the seconds of its steps."""

    plan: Plan
    layers: int
    seconds: tuple[float, ...]

    @property
    def typical(self) -> float:
        return typical(self.seconds)


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: other programs of a machine slow some repetitions, and speed up none.

    >>> typical([5.0, 1.0, 1.1, 9.0, 1.2])
    1.1
    """
    return sorted(seconds)[len(seconds) // 4]


def wanted(plan: Plan) -> Wanted:
    """The sizes of a plan that are measured."""
    flops: dict[Shape, float] = {}
    for one in step_products(plan):
        if one.weight is not None and one.phase != "recompute":
            shape = forward_shape(plan, one.weight, _forward(plan, one.weight)).of(one.product)
            flops[shape] = flops.get(shape, 0.0) + one.flops
    stream = plan.by_name.get(STREAM)
    seconds = {one: one.bytes_per_device * one.count_per_step for one in plan.collectives if one.subgroup is None}
    return Wanted(
        dtype=plan.request.dtype,
        products=tuple(sorted(flops, key=lambda shape: -flops[shape])[:MOST]),
        attention=local_attention(plan),
        copied=1 << 20 if stream is None else max(1 << 16, stream.bytes_per_device // 4),
        collectives=tuple(_chosen(sorted(seconds, key=lambda one: -seconds[one]))),
    )


def machine_without_numbers(devices: int, memory_bytes: float) -> Machine:
    """Simulated devices, of which nothing is known before a measurement: one domain."""
    given = {
        "usable_bytes": memory_bytes / devices,
        "devices_per_chip": 1,
        "domain_devices": devices,
        "bf16_flops_per_s": 1e12,
        "float32_share_of_bf16": 1.0,
        "hbm_bytes_per_s": 1e12,
        "scale_up_bytes_per_s": 1e9,
        "base_latency_s": 1e-6,
    }
    numbers = ChipNumbers(
        kind=CPU, name="simulated devices", network="switch", numbers=_cited(given, "before it was measured", "-")
    )
    return Machine(numbers=numbers, shape=(1, devices))


def fitted(plan: Plan, machine: Machine, found: Sequence[Measured], runs: Sequence[ShortRun], date: str) -> ChipNumbers:
    """The chip's numbers by what was measured on it."""
    assert machine.numbers is not None
    chip, here = machine.numbers, f"measured: shardwright calibrate {plan.request.table.name}"
    rates = {name: rate for name, rate in _rates(found).items() if rate}
    if chip.kind == CPU:
        rates["bf16_flops_per_s"], rates["hbm_bytes_per_s"] = (
            rates["product_bf16_flops_per_s"],
            rates["copy_bytes_per_s"],
        )
    elif plan.request.dtype == "float32":
        rates["product_bf16_flops_per_s"] /= chip.read("float32_share_of_bf16")
    links = _links(plan, machine, found)
    chip = replace(chip, numbers={**chip.numbers, **_cited({**rates, **links}, here, date)})
    if len(runs) > 1:
        chip = replace(chip, numbers={**chip.numbers, **_cited(_of_runs(chip, machine, runs), here, date)})
    return chip


def _rates(found: Sequence[Measured]) -> Mapping[str, float]:
    names = {
        "product": "product_bf16_flops_per_s",
        "attention forward": "attention_forward_flops_per_s",
        "attention backward": "attention_backward_flops_per_s",
        "copy": "copy_bytes_per_s",
    }
    totals: dict[str, tuple[float, float]] = {}
    for one in found:
        if one.what in names:
            amount, seconds = totals.get(names[one.what], (0.0, 0.0))
            totals[names[one.what]] = amount + one.amount, seconds + one.typical
    return {name: amount / seconds for name, (amount, seconds) in totals.items()}


def _links(plan: Plan, machine: Machine, found: Sequence[Measured]) -> Mapping[str, float]:
    """Latency and rate by least squares over the collectives. No rate is made faster by a latency below zero."""
    chip = machine.numbers
    assert chip is not None
    rates, mapping = Rates.of(chip, "used"), map_mesh(plan.mesh, machine)
    # Steps of rings keep their latencies: only the base is fitted.
    without_steps = replace(rates, steps=NO_STEPS)
    pairs = []
    by_size = {(one.what, one.size): one.typical for one in found}
    for one in wanted(plan).collectives:
        group = mapping.group(one.axes)
        time = time_of(one.kind, one.bytes_per_device, group, without_steps)
        measured = by_size.get((one.kind, collective_size(one)))
        if time is not None and measured is not None:
            in_steps = rates.steps.seconds(one.kind, group) if one.kind in RINGS else 0.0
            pairs.append((time.seconds - time.latency_s, max(0.0, measured - in_steps)))
    if not pairs:
        return {}
    mean_x, mean_y = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    factor = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else 0.0
    latency = mean_y - factor * mean_x
    if factor <= 0 or latency <= 0:
        factor, latency = mean_y / mean_x if mean_x else 1.0, 1e-7
    if rates.is_torus:
        return {"link_bytes_per_s": rates.link_bytes_per_s / factor}
    out = {} if rates.out_bytes_per_s is None else {"scale_out_bytes_per_s": rates.out_bytes_per_s / factor}
    return {"scale_up_bytes_per_s": rates.link_bytes_per_s / factor, "base_latency_s": latency, **out}


def _of_runs(chip: ChipNumbers, machine: Machine, runs: Sequence[ShortRun]) -> Mapping[str, float]:
    """Share and latency with which the estimates of the shortest and the longest run are what was measured."""
    first, last = min(runs, key=lambda one: one.layers), max(runs, key=lambda one: one.layers)

    def estimate(run: ShortRun, share: float) -> float:
        numbers = {**chip.numbers, **_cited({"kernels_share": share, "step_latency_s": 1e-12}, "tried", "-")}
        step = price(run.plan, replace(machine, numbers=replace(chip, numbers=numbers))).step
        assert step is not None
        return step.seconds

    more = max(1e-9, last.typical - first.typical)
    low, high = 1e-3, 1e3
    for _ in range(40):
        share = (low * high) ** 0.5
        # One layer more takes less the larger the share is.
        slower = estimate(last, share) - estimate(first, share) > more
        low, high = (share, high) if slower else (low, share)
    share = (low * high) ** 0.5
    latency = first.typical - estimate(first, share)
    if latency <= 0:
        low, high = 1e-3, 1e3
        for _ in range(40):
            share = (low * high) ** 0.5
            low, high = (share, high) if estimate(last, share) > last.typical else (low, share)
        latency = 1e-12
    spread = max(0.05, *(Measured(what="", size="", amount=0, seconds=run.seconds).spread for run in runs))
    return {"kernels_share": share, "step_latency_s": latency, "estimate_error_share": spread}


def collective_size(one: PlannedCollective) -> str:
    """A collective's size as a file says it."""
    return f"{one.bytes_per_device} B over {','.join(one.axes)}"


def file_text(chip: ChipNumbers, about: Sequence[str], found: Sequence[Measured], runs: Sequence[ShortRun]) -> str:
    """The file that ``--chips KIND:SHAPE+FILE`` takes, with everything that was measured."""
    lines = [*(f"# {line}" for line in about), f'kind = "{chip.kind}"']
    if chip.kind == CPU:
        lines += [f'name = "{chip.name}"', f'network = "{chip.network}"']
    lines += ["", "[numbers]"]
    for name, number in chip.numbers.items():
        used = number.used
        if chip.kind == CPU or used.source.startswith("measured: "):
            lines.append(f'{name} = {{ value = {used.value:.6g}, source = "{used.source}", date = "{used.date}" }}')
    lines.append("")
    whole = [
        *found,
        *(Measured(what="step", size=f"{run.layers} layers", amount=0.0, seconds=run.seconds) for run in runs),
    ]
    for one in whole:
        lines += [
            "[[measured]]",
            f'what = "{one.what}"',
            f'size = "{one.size}"',
            f"seconds = {one.typical:.6g}",
            f"spread = {one.spread:.3f}",
            f"times = {len(one.seconds)}",
            "",
        ]
    return "\n".join(lines)


def _cited(values: Mapping[str, float], source: str, date: str) -> dict[str, Number]:
    return {name: Number(used=Cited(value=value, source=source, date=date)) for name, value in values.items()}


def _forward(plan: Plan, weight: str) -> float:
    return next(one.flops for one in step_products(plan) if one.weight == weight and one.phase == "forward")


def _chosen(ones: Sequence[PlannedCollective]) -> list[PlannedCollective]:
    """The first of each kind, then others, each size once."""
    sizes: dict[tuple[str, tuple[str, ...], int], PlannedCollective] = {}
    for one in ones:
        sizes.setdefault((one.kind, one.axes, one.bytes_per_device), one)
    kinds = {one.kind: one for one in reversed(list(sizes.values()))}
    rest = [one for one in sizes.values() if kinds[one.kind] is not one]
    return [*kinds.values(), *rest][: max(MOST, len(kinds))]


def attention_flops(size: LocalAttention) -> float:
    """Flops of the forward pass, with half of the scores: of causal attention."""
    return size.rows * size.queries * size.keys * size.heads * (size.width + size.value_width)
