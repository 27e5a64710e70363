"""Seconds of one collective, in closed form.

V: bytes of the unsharded tensor. b: bytes that one device sends in an all-to-all or a permute. N devices in M domains,
g = N / M in each. W: bytes per second one way, of a torus link (shared by s groups) or of a GPU into its switch. E: the
same of a device out of its domain. n: devices along a line of a torus.

| where | all-gather = reduce-scatter | all-to-all | permute | source |
|---|---|---|---|---|
| torus | V / sum of rates; a ring has 2W/s, an open line W/s * n/(n-1) | the busiest bisection: b floor(n/2) ceil(n/2) / n over W/s, half of it in a ring | b s / W, the largest s | book, Sharded Matrices |
| node | V (g-1) / (g W) | b (g-1) / (g W) | b / W | book, GPUs |
| between domains | V (M-1) / (M g E) | b (M-1) / (M E) | b / E | book, GPUs |

Without a switch (``linked_devices`` of a chip, P) the links of a device go to P others, an equal share to each: g devices send to each other at
W (g-1) / P, and a permute at W / P.

Traffic inside and between domains overlaps, so the longer of the two counts; on a switch a part of the shorter too (``rings.py``). An
all-reduce is a reduce-scatter and an all-gather: twice. In one ring an all-to-all is a quarter of an all-gather of N b, as in the book; over
several dims it uses the links of all of them at once. Latency on a torus: a microsecond for each hop of the longest path, if that is
longer than the bytes take (book). On a switch: NCCL's base latency and that of each step of a ring or a tree, added to the bytes
(``rings.py``). Between slices none is known.

Book: How To Scale Your Model (jax-ml.github.io/scaling-book), 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from shardwright.core.plan.movement import Collective
from shardwright.core.plan.plan import PlannedCollective
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.hardware.links import Group, Line, MeshMapping
from shardwright.cost.steps.rings import NO_STEPS, RINGS, Steps, ring_seconds

PASSES = {"all-reduce": 2}
"""Time of a collective in multiples of an all-gather's, if not 1."""

LINKED_DEVICES = "linked_devices"
"""The number of a chip that says how many others its links go to, where no switch is between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bandwidth and latency of the links. ``out_bytes_per_s`` None: no source was checked for it. ``memory_bytes_per_s``: of a device.
    ``at_once``: how many collectives over different links run at the same time. ``steps``: of rings and trees on a switch. ``linked_devices``:
    to how many others a device's links go, an equal share to each; None where a switch connects all."""

    link_bytes_per_s: float
    out_bytes_per_s: float | None
    latency_s: float
    is_torus: bool
    memory_bytes_per_s: float = inf
    at_once: int = 1
    steps: Steps = NO_STEPS
    linked_devices: int | None = None

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, chip: ChipNumbers, reading: Reading) -> Rates:
        """The rates of a chip."""
        torus = chip.network == "torus"
        return cls(
            link_bytes_per_s=chip.read("link_bytes_per_s" if torus else "scale_up_bytes_per_s", reading),
            out_bytes_per_s=chip.read("scale_out_bytes_per_s", reading)
            if "scale_out_bytes_per_s" in chip.numbers
            else None,
            latency_s=chip.read("hop_latency_s" if torus else "base_latency_s", reading),
            is_torus=torus,
            memory_bytes_per_s=chip.limit("hbm_bytes_per_s"),
            at_once=chip.integer("collectives_at_once") if "collectives_at_once" in chip.numbers else 1,
            steps=Steps.of(chip),
            linked_devices=chip.integer(LINKED_DEVICES) if LINKED_DEVICES in chip.numbers else None,
        )

    def inside_bytes_per_s(self, peers: int) -> float:
        """The rate of a device of a node to so many others: of its links those that go to them."""
        return self.link_bytes_per_s * (1.0 if self.linked_devices is None else min(1.0, peers / self.linked_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of one collective; ``latency_s`` of them are the latency, which it takes even without bytes."""

    seconds: float
    latency_s: float

    @property
    def is_latency_bound(self) -> bool:
        """Whether the latency is at least as long as sending the bytes."""
        return 2 * self.latency_s >= self.seconds


def time_of(kind: str, bytes_per_device: int, group: Group, rates: Rates) -> Time | None:
    """Time of one collective of the plan; None if it needs a link without a figure.

    ``bytes_per_device``: as in the plan, of the operand or the result on one device, whichever is larger. For gathers
    and reductions that is the unsharded tensor; for an all-to-all and a permute it is the local shard.
    """
    if group.size == 1:
        return Time(seconds=0.0, latency_s=0.0)
    if group.domains > 1 and rates.out_bytes_per_s is None:
        return None
    if kind == "all-to-all":
        sent_s = max(
            _exchanged_inside(bytes_per_device, group, rates), _exchanged_outside(bytes_per_device, group, rates)
        )
    elif kind in ("permute", "send-recv"):
        sent_s = _permuted(bytes_per_device, group, rates)
    else:
        inside_s, outside_s = (
            _gathered_inside(bytes_per_device, group, rates),
            _gathered_outside(bytes_per_device, group, rates),
        )
        if not rates.is_torus and kind in RINGS:
            passes = PASSES.get(kind, 1)
            seconds, latency_s = ring_seconds(
                kind, bytes_per_device, (passes * inside_s, passes * outside_s), group, rates.latency_s, rates.steps
            )
            return Time(seconds=seconds, latency_s=latency_s)
        sent_s = max(inside_s, outside_s)
    passes = PASSES.get(kind, 1)
    if rates.is_torus:
        hops = sum(line.hops for line in group.lines)
        latency_s = passes * hops * rates.latency_s
        return Time(seconds=max(passes * sent_s, latency_s), latency_s=latency_s)
    return Time(seconds=passes * sent_s + rates.latency_s, latency_s=rates.latency_s)


def time_of_planned(one: PlannedCollective, mapping: MeshMapping, rates: Rates) -> Time | None:
    """Time of one execution of a collective of the plan, as the compiler makes it; None if it needs a link without a figure."""
    return time_of_sent(one, one.bytes_per_device, mapping, rates)


def time_of_sent(
    one: PlannedCollective | Collective, num_bytes: int, mapping: MeshMapping, rates: Rates
) -> Time | None:
    """The same of ``num_bytes``: of the operand or the result on one device, whichever is larger.

    Hops of chunks that run at the same time share that of the slowest. What a device has gathered apart, it then rearranges: it reads
    and writes it once.
    """
    times = [time_of(one.compiled_as or one.kind, num_bytes, mapping.group(one.axes, one.subgroup), rates)]
    at_once = 1 + len(one.beside) if rates.at_once > len(one.beside) else 1
    for other in one.beside if at_once > 1 else ():
        group = mapping.group(other.axes, other.subgroup)
        times.append(time_of(one.kind, round(num_bytes * other.share), group, rates))
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return None
    slowest = max(known, key=lambda time: time.seconds)
    copied_s = 2 * num_bytes / rates.memory_bytes_per_s if one.rearranged else 0.0
    return Time(seconds=slowest.seconds / at_once + copied_s, latency_s=slowest.latency_s / at_once)


def line_bytes_per_s(line: Line, link_bytes_per_s: float) -> float:
    """The rate at which a device gathers along a line: from both sides in a ring, from one side at an open end."""
    one_way = link_bytes_per_s / line.sharing
    return 2 * one_way if line.closed else one_way * line.size / (line.size - 1)


def _gathered_inside(unsharded_bytes: float, group: Group, rates: Rates) -> float:
    if group.inside == 1:
        return 0.0
    if rates.is_torus:
        # What a chip gathers comes in over the links of the torus: the line between its devices adds no rate to them.
        lines = [line for line in group.lines if not line.on_chip] or group.lines
        return unsharded_bytes / sum(line_bytes_per_s(line, rates.link_bytes_per_s) for line in lines)
    return unsharded_bytes * (group.inside - 1) / (group.inside * rates.inside_bytes_per_s(group.inside - 1))


def _gathered_outside(unsharded_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains == 1:
        return 0.0
    assert rates.out_bytes_per_s is not None
    return unsharded_bytes * (group.domains - 1) / (group.domains * group.inside * rates.out_bytes_per_s)


def _exchanged_inside(own_bytes: float, group: Group, rates: Rates) -> float:
    inside_bytes = own_bytes / group.domains
    if not rates.is_torus and group.inside > 1:
        return inside_bytes * (group.inside - 1) / (group.inside * rates.inside_bytes_per_s(group.inside - 1))
    return max((_across_bisection(inside_bytes, line, rates.link_bytes_per_s) for line in group.lines), default=0.0)


def _across_bisection(own_bytes: float, line: Line, link_bytes_per_s: float) -> float:
    """Half of the devices send to the other half over the bisection: one link, or two in a ring."""
    one_way = own_bytes * (line.size // 2) * (line.size - line.size // 2) / line.size
    return one_way * line.sharing / (link_bytes_per_s * (2 if line.closed else 1))


def _exchanged_outside(own_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains == 1:
        return 0.0
    assert rates.out_bytes_per_s is not None
    return own_bytes * (group.domains - 1) / (group.domains * rates.out_bytes_per_s)


def _permuted(own_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains > 1:
        assert rates.out_bytes_per_s is not None
        return own_bytes / rates.out_bytes_per_s
    # A group's ring takes steps along each of its lines, and all wait for the slowest line.
    sharing = max((line.sharing for line in group.lines), default=1)
    return own_bytes * sharing / rates.inside_bytes_per_s(1)
