"""SW207: a step that has no time, because a number of the chip is missing that no source was checked for."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.codes import NO_NUMBER
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, every
from shardwright.core.plan.plan import Plan
from shardwright.cost.hardware.chips import ChipNumbers
from shardwright.cost.steps.precision import kernels_of
from shardwright.cost.steps.products import RATES
from shardwright.cost.steps.step import Times

OUT = "scale_out_bytes_per_s"


def missing(plan: Plan, chip: ChipNumbers, times: Times) -> Iterator[Finding]:
    """One finding at most. A plan that has errors has those first."""
    if plan.step is not None or plan.errors:
        return
    lacked: dict[str, str] = {}
    untimed = sum(time is None for time in times)
    if untimed and OUT not in chip.numbers:
        domain = "slice" if chip.network == "torus" else "node"
        lacked[OUT] = f"{count(untimed, 'collective')} {'leaves' if untimed == 1 else 'leave'} a {domain}"
    for rate in _rates(plan, chip):
        lacked[rate] = "products are of quantized codes"
    if lacked:
        yield Finding(
            code=NO_NUMBER,
            severity="warning",
            where=f"a step of {plan.request.table.name} on {chip.name}",
            found="\n".join(f"{why}, and no source was checked for {name}" for name, why in lacked.items())
            + "\nso the step has no time",
            needed=f"{every(lacked)} in a file of yours: --chips KIND:SHAPE+FILE",
        )


def _rates(plan: Plan, chip: ChipNumbers) -> Iterator[str]:
    """The rates of the kernels of quantized products that the chip has no number for, each once."""
    kernels = (kernels_of(plan, weight, chip) for weight in plan.quantized)
    needed = {RATES[chosen.kernel.rate] for of_weight in kernels for chosen in of_weight.values()}
    yield from sorted(needed - set(chip.numbers))
