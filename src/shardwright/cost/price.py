"""A plan with what it costs on a machine."""

from __future__ import annotations

from shardwright.core.plan import Plan
from shardwright.cost.machine import Machine


def price(plan: Plan, machine: Machine) -> Plan:  # noqa: ARG001
    return plan
