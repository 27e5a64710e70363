"""What a step reaches of its kernels' rates, by the published steps that are not left out: ``kernels_share`` of measured.toml.

python -m benchmarks.published.fit

A step's compute would take ``compute`` seconds at the rates of its kernels, and took what was published less the communication that the
plan says is exposed. The share of a family of chips is the median over its steps; that of all others the median over families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from benchmarks.published.planned import machine_of, plan_of, published_seconds
from benchmarks.published.steps import published
from shardwright.cost import price
from shardwright.cost.hardware.chips import Cited, Number

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "A100": ("a100",),
    "Hopper": ("h100", "h200", "h800"),
    "Hopper at 500 W": ("h100-96gb",),
    "Blackwell": ("b200", "gb200"),
    "TPU v5e": ("v5e",),
    "TPU v5p": ("v5p",),
    "TPU v6e": ("v6e",),
    "TPU7x": ("tpu7x",),
}
"""Chips with one architecture and one limit of power reach one share."""


def fitted() -> Mapping[str, list[float]]:
    """The shares that single steps reached, by family."""
    found: dict[str, list[float]] = {family: [] for family in FAMILIES}
    whole = Number(used=Cited(value=1.0, source="of the kernels alone", date="2026"))
    for step in published():
        if step.left_out:
            continue
        machine = machine_of(step)
        assert machine.numbers is not None
        numbers = {**machine.numbers.numbers, "kernels_share": whole}
        cost = price(plan_of(step), replace(machine, numbers=replace(machine.numbers, numbers=numbers))).step
        # Communication is hidden behind what the step really takes, so that the share is found on the second look.
        assert cost is not None
        share = cost.compute_seconds / (published_seconds(step) - cost.exposed_seconds)
        family = next(family for family, kinds in FAMILIES.items() if machine.numbers.kind in kinds)
        found[family].append(share)
    return found


def main() -> None:
    """Print them."""
    shares = fitted()
    for family, each in shares.items():
        print(f"{family:<16} {median(each):.3f}  of {len(each)}: {', '.join(f'{one:.2f}' for one in sorted(each))}")
    print(f"{'all others':<16} {median(median(each) for each in shares.values()):.3f}")


if __name__ == "__main__":
    main()
