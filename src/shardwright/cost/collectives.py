"""Seconds of one collective, in closed form.

V bytes of the whole tensor, b those that one device sends in an all-to-all or a permute; N devices in M domains with
g = N / M in each; W bytes per second one way, of a link of a torus (shared by s groups) or of a GPU into its switch;
E those of a device out of its domain; n devices along a line of a torus.

| where | all-gather = reduce-scatter | all-to-all | permute | source |
|---|---|---|---|---|
| torus | V / sum of rates; a ring has 2W/s, an open line W/s * n/(n-1) | the fullest cut: b floor(n/2) ceil(n/2) / n over W/s, half of it in a ring | b s / W, the largest s | book, Sharded Matrices |
| node | V (g-1) / (g W) | b (g-1) / (g W) | b / W | book, GPUs |
| between domains | V (M-1) / (M g E) | b (M-1) / (M E) | b / E | book, GPUs |

Inside and outside overlap, so the longer of the two counts. An all-reduce is a reduce-scatter and an all-gather: twice.
In one ring an all-to-all is a quarter of an all-gather of N b, as in the book; over several dims the links of all of
them carry it at once. Latency: on a torus a microsecond for each hop of the longest path, if that is longer than the
bytes take (book); NCCL's base latency before the bytes on a switch (NCCL, tuning). None is known between slices.

Book: How To Scale Your Model (jax-ml.github.io/scaling-book), 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.chips import ChipNumbers, Reading
from shardwright.cost.links import Group, Line

PASSES = {"all-reduce": 2}
"""How many times the time of a gather a collective takes, where it is not once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What links do, in bytes and seconds. ``out_bytes_per_s`` None: no source was checked for it."""

    link_bytes_per_s: float
    out_bytes_per_s: float | None
    latency_s: float
    is_torus: bool

    @classmethod
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of one collective, and of those what it takes to send no bytes at all."""

    seconds: float
    latency_s: float

    @property
    def waits(self) -> bool:
        """Whether it takes longer to reach the others than to send the bytes."""
        return 2 * self.latency_s >= self.seconds


def time_of(kind: str, bytes_per_device: int, group: Group, rates: Rates) -> Time | None:
    """Time of one collective of the plan; None where it needs a link without a figure.

    ``bytes_per_device`` as the plan has it: of the operand or the result on one device, whichever is larger. That is
    the whole tensor for gathers and reductions, and a device's own part for an all-to-all and a permute.
    """
    if group.size == 1:
        return Time(seconds=0.0, latency_s=0.0)
    if group.domains > 1 and rates.out_bytes_per_s is None:
        return None
    if kind == "all-to-all":
        sent_s = max(_exchanged_inside(bytes_per_device, group, rates), _exchanged(bytes_per_device, group, rates))
    elif kind in ("permute", "send-recv"):
        sent_s = _passed_on(bytes_per_device, group, rates)
    else:
        sent_s = max(_gathered_inside(bytes_per_device, group, rates), _gathered(bytes_per_device, group, rates))
    passes = PASSES.get(kind, 1)
    if rates.is_torus:
        hops = sum(line.hops for line in group.lines)
        latency_s = passes * hops * rates.latency_s
        return Time(seconds=max(passes * sent_s, latency_s), latency_s=latency_s)
    return Time(seconds=passes * sent_s + rates.latency_s, latency_s=rates.latency_s)


def line_bytes_per_s(line: Line, link_bytes_per_s: float) -> float:
    """The rate at which a device gathers along a line: from both sides of a ring, from one side at an open end."""
    one_way = link_bytes_per_s / line.sharing
    return 2 * one_way if line.closed else one_way * line.size / (line.size - 1)


def _gathered_inside(unsharded_bytes: float, group: Group, rates: Rates) -> float:
    if group.inside == 1:
        return 0.0
    if rates.is_torus:
        return unsharded_bytes / sum(line_bytes_per_s(line, rates.link_bytes_per_s) for line in group.lines)
    return unsharded_bytes * (group.inside - 1) / (group.inside * rates.link_bytes_per_s)


def _gathered(unsharded_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains == 1:
        return 0.0
    assert rates.out_bytes_per_s is not None
    return unsharded_bytes * (group.domains - 1) / (group.domains * group.inside * rates.out_bytes_per_s)


def _exchanged_inside(own_bytes: float, group: Group, rates: Rates) -> float:
    stays = own_bytes / group.domains
    if not rates.is_torus:
        return stays * (group.inside - 1) / (group.inside * rates.link_bytes_per_s)
    return max((_through_the_middle(stays, line, rates.link_bytes_per_s) for line in group.lines), default=0.0)


def _through_the_middle(own_bytes: float, line: Line, link_bytes_per_s: float) -> float:
    """Half of the devices send to the other half through the one link between them, or the two of a ring."""
    one_way = own_bytes * (line.size // 2) * (line.size - line.size // 2) / line.size
    return one_way * line.sharing / (link_bytes_per_s * (2 if line.closed else 1))


def _exchanged(own_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains == 1:
        return 0.0
    assert rates.out_bytes_per_s is not None
    return own_bytes * (group.domains - 1) / (group.domains * rates.out_bytes_per_s)


def _passed_on(own_bytes: float, group: Group, rates: Rates) -> float:
    if group.domains > 1:
        assert rates.out_bytes_per_s is not None
        return own_bytes / rates.out_bytes_per_s
    # The ring of a group takes a step along each of its lines, and all wait for the slowest.
    sharing = max((line.sharing for line in group.lines), default=1)
    return own_bytes * sharing / rates.link_bytes_per_s
