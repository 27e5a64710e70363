"""The compiled part of a lock: the program that a target's compiler makes now, and what compiled it."""

from __future__ import annotations

import sys
from typing import Any

from shardwright.cli.running.compile import Compiled, compile_plan
from shardwright.cli.typed.request import TypedRequest
from shardwright.core.findings.errors import InputError
from shardwright.core.installed import installed_version
from shardwright.core.plan.plan import Plan
from shardwright.cost import Machine
from shardwright.locks.lock import compiled_part

EVERYWHERE = ("jax", "jaxlib")
TPU = ("libtpu",)
GPU = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
"""Whose versions a lock holds, of those that are there."""


def compiled_now(question: TypedRequest, plan: Plan, target: str) -> dict[str, Any]:
    """The compiled part. Raises InputError where it cannot be compiled here."""
    return part_of(compiled_for(question, plan, target), question)


def compiled_for(question: TypedRequest, plan: Plan, target: str) -> Compiled:
    """The program for a target. Raises InputError where it cannot be compiled here."""
    machine = question.machine
    if machine is not None and machine.numbers is None and "jax" in sys.modules:
        # JAX has started, for another lock, and shows as many devices as it did then.
        there = len(sys.modules["jax"].devices("cpu"))
        if there < machine.num_devices:
            raise InputError(
                f"{machine.num_devices} simulated devices, and this process has {there}. Check this lock alone."
            )
    return compile_plan(question, plan, target)


def part_of(compiled: Compiled, question: TypedRequest) -> dict[str, Any]:
    """What a lock holds of it."""
    program = compiled.program
    return compiled_part(program.target, program.to_json(), versions(question.machine))


def versions(machine: Machine | None) -> dict[str, str]:
    """Of what compiles for a machine, by package."""
    numbers = None if machine is None else machine.numbers
    own = () if numbers is None else TPU if numbers.network == "torus" else GPU
    found = {package: installed_version(package) for package in (*EVERYWHERE, *own)}
    return {package: number for package, number in found.items() if number is not None}
