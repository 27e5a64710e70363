"""Layouts with sizes of their axes that suit a machine: a bounded number of them, the likeliest first.

| axis | sizes |
|---|---|
| experts | those that divide the experts and the devices of a domain, the largest first; one size across domains |
| tensor, context | 8, 4, 2 within a domain |
| replicas | one group of replicas for each domain; and the odd factor of the number of devices, as 9 of domains of 72 |
| `auto` | what is left |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from shardwright.core.findings.draft import Candidate
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.divisors import divisors
from shardwright.core.model.table import ModelTable
from shardwright.core.resolution.mesh_sizes import mesh_option, mesh_text
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.machine import Machine

DENSE = ("fsdp", "hsdp", "fsdp-tp", "tp", "cp", "ddp")
MIXTURE = ("fsdp", "ep", "ep-as-cp", "ep-as-dp", "hsdp", "ddp")
"""The presets that are tried for a model without experts, and for one with experts."""

MOST_WITHIN = 2
"""Sizes of an axis within a domain that are tried."""

MOST_EXPERTS = 64
"""Devices that one group of experts has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A layout on a machine, with a size for each of its axes. ``form``: the role table that it is of (``forms.py``), if a search made it."""

    layout: Layout
    sizes: Mapping[str, int]
    form: str = ""

    @property
    def text(self) -> str:
        """The options that ask for it."""
        return f"--layout {self.layout.name} {mesh_option(self.sizes)}"

    @property
    def key(self) -> str:
        """What tells it from all others of a search."""
        return f"{self.form} {mesh_text(self.sizes)}"

    def of(self, request: Request) -> Request:
        """The request under this layout."""
        return replace(request, layout=self.layout, mesh_sizes=self.sizes, devices=prod(self.sizes.values()))

    @property
    def candidate(self) -> Candidate:
        return Candidate(text=self.text, edit=self.of)


def presets_for(table: ModelTable) -> tuple[str, ...]:
    """The names of the presets that are tried for a model."""
    return DENSE if table.top_k is None else MIXTURE


def arrangements(table: ModelTable, machine: Machine, layouts: Iterable[Layout]) -> tuple[Arrangement, ...]:
    """Those of each layout on all devices of a machine; none of a layout that has no sizes there."""
    return tuple(arrangement for layout in layouts for arrangement in _of_layout(table, machine, layout))


def _of_layout(table: ModelTable, machine: Machine, layout: Layout) -> Iterator[Arrangement]:
    devices = machine.num_devices
    automatic = next((axis for axis, entry in layout.mesh.items() if entry.size == "auto"), None)
    if automatic is None:
        return
    choices = {axis: _sizes(table, machine, layout, axis) for axis in layout.mesh if axis != automatic}
    for sizes in product(*choices.values()):
        rest, remainder = divmod(devices, prod(sizes))
        if remainder or (rest > 1 and not _may_be(layout, automatic, rest, machine)):
            continue
        chosen = dict(zip(choices, sizes, strict=True))
        yield Arrangement(layout=layout, sizes={axis: chosen.get(axis, rest) for axis in layout.mesh})


def _sizes(table: ModelTable, machine: Machine, layout: Layout, axis: str) -> list[int]:
    roles, devices, domain = set(layout.entries[axis].roles.values()), machine.num_devices, machine.domain_devices
    if "expert" in roles:
        shared = [size for size in divisors(devices) if table.sizes.get("experts", 1) % size == 0]
        within = [size for size in shared if 1 < size <= min(domain, MOST_EXPERTS)]
        across = [size for size in shared if domain < size <= MOST_EXPERTS]
        return [*reversed(within[-MOST_WITHIN:]), *across[-1:]]
    if roles & {"tensor", "context"}:
        return [size for size in (8, 4, 2) if size <= domain and devices % size == 0][:MOST_WITHIN]
    size = layout.mesh[axis].size
    # A power of two is left to shard by, which divides dims of models.
    odd = [devices // (devices & -devices)] if layout.entries[axis].elsewhere == "data" and devices % 2 == 0 else []
    if layout.entries[axis].elsewhere != "data" or size == 1:
        return list(dict.fromkeys([1, *odd]))
    domains = devices // domain
    usual = [domains] if domains > 1 else [2] if devices % 2 == 0 else []
    return list(dict.fromkeys([*usual, *(size for size in odd if size > 1)]))


def _may_be(layout: Layout, axis: str, size: int, machine: Machine) -> bool:
    """Whether the axis that takes the rest may have this size: tensor parallelism stays within a domain."""
    roles = set(layout.entries[axis].roles.values())
    return "tensor" not in roles or size <= min(machine.domain_devices, 8)
