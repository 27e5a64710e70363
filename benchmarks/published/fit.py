"""What a step reaches of its kernels' rates, by the published steps that are not left out: ``kernels_share`` of measured.toml.

python -m benchmarks.published.fit

A step's compute, and what its stages wait for it, would take so many seconds at the rates of its kernels, and took what was published less the communication
that the plan says is exposed. The share of a family of chips is the median over its steps of all lists; that of all others the median over families. Steps
whose file of chips has a share of their own are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from benchmarks.published.planned import machine_of, plan_of, published_seconds
from benchmarks.published.steps import to_fit
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.cost import Machine
from shardwright.cost.advice import with_choices
from shardwright.cost.hardware.chips import Cited, Number, chip_of
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.steps.pipeline import timed_pipeline
from shardwright.cost.steps.step import timed

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "A100": ("a100",),
    "Hopper": ("h100", "h200", "h800"),
    "Hopper at 500 W": ("h100-96gb",),
    "Blackwell at 1,000 W": ("b200",),
    "Blackwell at 1,200 W": ("gb200",),
    "Blackwell Ultra": ("b300", "gb300"),
    "TPU v4": ("v4",),
    "TPU v5e": ("v5e",),
    "TPU v5p": ("v5p",),
    "TPU v6e": ("v6e",),
    "TPU7x": ("tpu7x",),
}
"""Chips with one architecture and one limit of power reach one share; of B300, whose limit is lower than GB300's, three steps to fit are too few for its own."""


def fitted() -> Mapping[str, list[float]]:
    """The shares that single steps reached, by family."""
    found: dict[str, list[float]] = {family: [] for family in FAMILIES}
    whole = Number(used=Cited(value=1.0, source="of the kernels alone", date="2026"))
    for step in to_fit():
        machine = machine_of(step)
        assert machine.numbers is not None
        family = next((family for family, kinds in FAMILIES.items() if machine.numbers.kind in kinds), None)
        if family is None or machine.numbers.kernels_share() != chip_of(machine.numbers.kind).kernels_share():
            continue
        numbers = {**machine.numbers.numbers, "kernels_share": whole}
        cost = _cost(plan_of(step), replace(machine, numbers=replace(machine.numbers, numbers=numbers)))
        busy = cost.compute_seconds + cost.idle_seconds
        found[family].append(busy / (published_seconds(step) - cost.exposed_seconds))
    return found


def _cost(plan: Plan, machine: Machine) -> StepCost:
    """Of a step, without findings."""
    assert machine.numbers is not None
    mapping = map_mesh(plan.mesh, machine)
    plan = with_choices(plan, mapping, make_plan)
    found = timed(plan, mapping) if plan.pipeline is None else timed_pipeline(plan, mapping, machine.numbers, "used")
    assert found is not None
    assert found.step is not None
    return found.step


def main() -> None:
    """Print them."""
    shares = fitted()
    for family, each in shares.items():
        print(f"{family:<20} {median(each):.3f}  of {len(each)}: {', '.join(f'{one:.2f}' for one in sorted(each))}")
    print(f"{'all others':<20} {median(median(each) for each in shares.values()):.3f}")


if __name__ == "__main__":
    main()
