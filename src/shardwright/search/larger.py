"""The smallest machine of the same chips on which a model fits, where it does not fit on the one that was asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.findings.errors import InputError
from shardwright.cost.hardware.machine import Machine, read_machine
from shardwright.search.solving import Solver
from shardwright.search.space.space import least_bytes, space_of

MOST_TRIED = 24
"""Layouts of each machine that are tried, those with the smallest state first."""

MOST_DOUBLINGS = 6


def smallest_that_fits(solver: Solver) -> Machine | None:
    """Twice, four times ... the machine: the first on which some layout fits; None if none of them has one."""
    for machine in _larger(solver.machine):
        rows = -(-solver.request.batch // machine.num_devices) * machine.num_devices
        request = replace(solver.request, chip=machine.chip, batch=rows)
        able = replace(solver, request=request, machine=machine)
        arrangements = sorted(space_of(request, machine).arrangements, key=lambda item: least_bytes(item, request))
        for arrangement in arrangements[:MOST_TRIED]:
            if any(node.level != "unfit" for node in able.first(arrangement)):
                return machine
    return None


def _larger(machine: Machine) -> Iterator[Machine]:
    """Twice as many nodes, or a torus that is twice as long along its shortest dim, as long as there are such machines."""
    for _ in range(MOST_DOUBLINGS):
        shape, slices = list(machine.shape), machine.slices
        if machine.numbers is not None and machine.numbers.network == "torus" and slices == 1:
            shape[shape.index(min(shape))] *= 2
        elif machine.numbers is not None and machine.numbers.network == "torus":
            slices *= 2
        else:
            shape[0] *= 2
        text = replace(machine, shape=tuple(shape), slices=slices).text
        try:
            read_machine(text)
        except InputError:
            return
        machine = replace(machine, shape=tuple(shape), slices=slices)
        yield machine
