"""Latency and bandwidth of gathers, scatters and sums on a switch, as NCCL does them.

g devices in each of M domains. Each way has a latency for each step, and reaches a share of the links' rates; NCCL takes the fastest:

| way | latency | share of the rate inside | outside |
|---|---|---:|---:|
| ring, for a gather or a scatter | base + M (g-1) steps inside + (M-1) steps outside | 1 | 1 |
| tree, for a sum | base + 2 ((g-1) steps inside + log2(M) steps outside) | 1 | 1 |
| the same of protocol LL, for small messages | ``QUICK`` for base and steps | 0.38 | 0.05 |
| in the switch of one domain (NVLS) | 25 us | ``switch_share`` | |

Base and steps of protocol Simple are numbers of the chip. A ring over several domains sends inside and between them at the same time, but not
quite: of the shorter of both a share counts too, which is smaller for large messages (``SERIAL``).

Sources: NCCL's tuning (src/graph/tuning.cc, June 2026: latencies, and bandwidths of LL on Hopper, 141 GB/s in a node of 370, 20 over four or more of
400); SERIAL: meta-pytorch/autoparallel #474, nccl-tests over 16 to 256 H100, which reached 0.68 of the rate with up to 8 MB a device, and 0.87 from 32 MB on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from shardwright.cost.hardware.chips import ChipNumbers
from shardwright.cost.hardware.links import Group

RINGS = ("all-gather", "reduce-scatter", "all-reduce")

IN_SWITCH_S = 25e-6
"""Latency of NVLS, without another base."""

STEP_S, MEASURED_STEPS = 3.4e-6, 7
"""A step within a domain in NCCL's tuning, and those of the group of 8 B200 that was measured, where they take longer: how much longer in groups of several
domains nobody published, and with 9.2 us for all of them 8B took longer on 64 B200 than on 64 H100."""

SERIAL = ((8e6, 0.4), (32e6, 0.13))
"""Bytes of a device's shard, and the share of the shorter of inside and outside that does not overlap with the longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Latency of a step within a domain and of one between domains; 0 where no source was checked: then there is one way, the first. ``switch_share``: of the rate within a
    domain, what the switch reaches; None where it does not gather."""

    inside_s: float = 0.0
    outside_s: float = 0.0
    switch_share: float | None = None

    @classmethod
    def of(cls, chip: ChipNumbers) -> Steps:
        """Those of a chip."""
        inside, outside = "ring_step_latency_s", "ring_out_step_latency_s"
        return cls(
            inside_s=chip.read(inside) if inside in chip.numbers else 0.0,
            outside_s=chip.read(outside) if outside in chip.numbers else 0.0,
            switch_share=chip.read("switch_gather_share") if "switch_gather_share" in chip.numbers else None,
        )

    def seconds(self, kind: str, group: Group) -> float:
        """The latency of all steps of a collective.

        >>> Steps(inside_s=3.4e-6, outside_s=14e-6).seconds("all-gather", Group(inside=8, domains=32)) * 1e6
        1195.6
        """
        if kind == "all-reduce":
            return 2 * (self._inside(group.inside - 1) + log2(group.domains) * self.outside_s)
        return self._inside(group.domains * (group.inside - 1)) + (group.domains - 1) * self.outside_s

    def _inside(self, steps: int) -> float:
        """So many steps within domains: what was measured beyond NCCL's own figure counts for as many as were measured."""
        return steps * min(self.inside_s, STEP_S) + min(steps, MEASURED_STEPS) * max(0.0, self.inside_s - STEP_S)


NO_STEPS = Steps()

QUICK_BASE_S = 6.6e-6
QUICK = Steps(inside_s=1e-6, outside_s=2.7e-6)
"""Of protocol LL; in a node a step takes 0.6 us."""
QUICK_SHARES = (0.38, 0.05)
"""What LL reaches of the rates inside and outside."""


def ring_seconds(
    kind: str, unsharded_bytes: float, sent_s: tuple[float, float], group: Group, base_s: float, steps: Steps
) -> tuple[float, float]:
    """Seconds of a collective in the fastest way, and the latency among them. ``sent_s``: what its bytes take inside and outside."""
    inside_s, outside_s = sent_s
    longer, shorter = max(sent_s), min(sent_s)
    latency_s = base_s + steps.seconds(kind, group)
    if not steps.inside_s:
        return latency_s + longer, latency_s
    sent = longer + serial_share(unsharded_bytes / group.size) * shorter if shorter else longer
    fastest = latency_s + sent, latency_s
    if longer < latency_s:
        quick_s = QUICK_BASE_S + QUICK.seconds(kind, group)
        fastest = min(fastest, (quick_s + max(inside_s / QUICK_SHARES[0], outside_s / QUICK_SHARES[1]), quick_s))
    if steps.switch_share is not None and group.domains == 1:
        fastest = min(fastest, (IN_SWITCH_S + inside_s / steps.switch_share, IN_SWITCH_S))
    return fastest


def serial_share(shard_bytes: float) -> float:
    """The share of the shorter of inside and outside that counts beside the longer.

    >>> serial_share(1e6), round(serial_share(16e6), 3), serial_share(64e6)
    (0.4, 0.265, 0.13)
    """
    (small, at_small), (large, at_large) = SERIAL
    ramp = log2(min(large, max(small, shard_bytes)) / small) / log2(large / small)
    return at_small + ramp * (at_large - at_small)
