"""The compiled program of a lock: what a target's compiler makes now, and the versions of what compiled it."""

from __future__ import annotations

import sys
from typing import Any

from shardwright.cli.running.compile import Compiled, compile_plan
from shardwright.cli.typed.request import TypedRequest
from shardwright.core.findings.errors import InputError
from shardwright.core.installed import installed_version
from shardwright.core.plan.plan import Plan
from shardwright.cost import Machine
from shardwright.locks.lock import compiled_program

EVERYWHERE = ("jax", "jaxlib")
TPU = ("libtpu",)
GPU = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
"""The packages whose versions a lock holds, if they are installed."""


def compiled_now(typed: TypedRequest, plan: Plan, target: str) -> dict[str, Any]:
    """What a lock holds of the program for a target. Raises InputError where this machine cannot compile it."""
    return locked_part(compiled_for(typed, plan, target), typed)


def compiled_for(typed: TypedRequest, plan: Plan, target: str) -> Compiled:
    """The program for a target. Raises InputError where this machine cannot compile it."""
    machine = typed.machine
    if machine is not None and machine.numbers is None and "jax" in sys.modules:
        # JAX has started, for another lock, and its number of devices is fixed since then.
        there = len(sys.modules["jax"].devices("cpu"))
        if there < machine.num_devices:
            raise InputError(
                f"{machine.num_devices} simulated devices, and this process has {there}. Check this lock alone."
            )
    return compile_plan(typed, plan, target)


def locked_part(compiled: Compiled, typed: TypedRequest) -> dict[str, Any]:
    """What a lock holds of a compiled program."""
    program = compiled.program
    return compiled_program(program.target, program.to_json(), versions(typed.machine))


def versions(machine: Machine | None) -> dict[str, str]:
    """The versions of the packages that compile for a machine."""
    numbers = None if machine is None else machine.numbers
    own = () if numbers is None else TPU if numbers.network == "torus" else GPU
    found = {package: installed_version(package) for package in (*EVERYWHERE, *own)}
    return {package: number for package, number in found.items() if number is not None}
