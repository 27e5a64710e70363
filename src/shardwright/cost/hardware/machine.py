"""The machine that ``--chips KIND:SHAPE`` gives: chips of one kind, in a shape that their network has."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.findings.bounds import within
from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.hops import WholeSlice
from shardwright.core.resolution.request import Chip
from shardwright.cost.hardware.chips import CPU, ChipNumbers
from shardwright.cost.hardware.user import base_of, with_file

_SHAPE = re.compile(r"(?P<shape>[1-9][0-9]{0,18}(x[1-9][0-9]{0,18}){0,7})(\*(?P<slices>[1-9][0-9]{0,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One or more tori of chips (``slices``), or nodes of GPUs. ``numbers`` None: simulated devices, without links.

    ``shape``: chips along each dim of one torus, or the number of nodes and of GPUs in a node.
    """

    numbers: ChipNumbers | None
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def num_devices(self) -> int:
        return prod(self.shape) * self.slices * self.devices_per_chip

    @property
    def text(self) -> str:
        """The machine as ``--chips`` gives it, without a file of numbers."""
        kind = CPU if self.numbers is None else self.numbers.kind
        slices = f"*{self.slices}" if self.slices > 1 else ""
        return f"{kind}:{'x'.join(map(str, self.shape))}{slices}"

    @property
    def domain_devices(self) -> int:
        """Devices of one domain: a torus slice, or a node of GPUs."""
        is_node = self.numbers is not None and self.numbers.network != "torus"
        return self.shape[1] if is_node else prod(self.shape) * self.devices_per_chip

    @property
    def devices_per_chip(self) -> int:
        return 1 if self.numbers is None else self.numbers.integer("devices_per_chip")

    @property
    def chip(self) -> Chip | None:
        """What the core needs of a chip; None for simulated devices, which have no memory limit."""
        if self.numbers is None or self.numbers.kind == CPU:
            return None
        return replace(self.numbers.chip, whole_slice=self._whole_slice, machine=self.text)

    @property
    def _whole_slice(self) -> WholeSlice | None:
        """How a collective over all devices is done; None unless the machine is one torus slice."""
        assert self.numbers is not None
        if self.numbers.network != "torus" or self.slices > 1:
            return None
        return WholeSlice(
            dims=(*self.shape, *((self.devices_per_chip,) if self.devices_per_chip > 1 else ())),
            on_chip=self.devices_per_chip,
            gathers=self.numbers.limit("whole_slice_gather_devices"),
            scatters=self.numbers.limit("whole_slice_scatter_devices"),
        )


def read_machine(text: str) -> Machine:
    """The machine that ``KIND:SHAPE`` gives; ``*2`` after a torus means two slices of it, and ``+FILE`` the numbers of a file (``user.py``).

    Raises InputError for a text that is not a shape, an unknown kind, and a shape that this kind of chip does not have.

    >>> read_machine("v5p:4x4x4*2").num_devices, read_machine("tpu7x:2x2x1").num_devices
    (128, 8)
    >>> read_machine("h100:2x8").shape, read_machine("h100:8").shape
    ((2, 8), (1, 8))
    """
    written, *files = text.split("+")
    kind, colon, rest = written.partition(":")
    match = _SHAPE.fullmatch(rest)
    if not colon or match is None:
        raise InputError(
            f"--chips: '{text}' does not give a kind of chip and a shape. Expected: KIND:SHAPE, as in v5p:4x4x4, "
            f"v5p:4x4x4*2 for two slices, h100:8x8, h100:64 or cpu:8. A file of your own numbers follows as +FILE."
        )
    shape = tuple(int(number) for number in match["shape"].split("x"))
    slices = int(match["slices"] or 1)
    if kind == CPU and not files:
        return _bounded(text, Machine(numbers=None, shape=shape, slices=slices))
    numbers = base_of(kind, tuple(files))
    for file in files:
        numbers = with_file(kind, numbers, file)
    assert numbers is not None
    if numbers.network == "torus":
        _check_torus(text, numbers, shape)
    else:
        shape = _nodes(text, numbers, shape, match["slices"])
    return _bounded(text, Machine(numbers=numbers, shape=shape, slices=slices))


def _bounded(text: str, machine: Machine) -> Machine:
    within(f"--chips: the number of devices of '{text}'", machine.num_devices, "devices")
    return machine


def _check_torus(text: str, numbers: ChipNumbers, shape: tuple[int, ...]) -> None:
    dims, kind = numbers.integer("torus_dims"), numbers.kind
    form, example = f"{kind}:{'x'.join('XYZ'[:dims])}", f"{kind}:{'x'.join('4' * dims)}"
    if len(shape) != dims:
        raise InputError(
            f"--chips: '{text}' has {len(shape)} {'dim' if len(shape) == 1 else 'dims'}, and a slice of {numbers.name} "
            f"is a torus of {dims}. Expected: {form}, as in {example}."
        )
    longest, pod = numbers.integer("longest_dim_chips"), numbers.integer("pod_chips")
    if max(shape) > longest or prod(shape) > pod:
        raise InputError(
            f"--chips: '{text}' is larger than a slice of {numbers.name} can be: {longest} chips along a dim and {pod} "
            f"in total. Two slices are written as {example}*2."
        )


def _nodes(text: str, numbers: ChipNumbers, shape: tuple[int, ...], slices: str | None) -> tuple[int, ...]:
    domain, kind = numbers.integer("domain_devices"), numbers.kind
    form = f"{kind}:NODESxGPUS, as in {kind}:2x{domain}, or {kind}:{domain} for one node"
    if len(shape) > 2 or slices:
        raise InputError(f"--chips: '{text}' is not a shape of {numbers.name}. Expected: {form}.")
    nodes, per_node = shape if len(shape) == 2 else (1, *shape)
    if per_node > domain:
        raise InputError(
            f"--chips: '{text}' has {per_node} GPUs in a node, and {numbers.name} has {domain} at most. Expected: {form}."
        )
    return nodes, per_node
