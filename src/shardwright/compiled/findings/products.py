"""SW307: matrix products of a device beyond its share of the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import FLOPS_WARNING_SHARE
from shardwright.core.layout.wording import percent
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.resolve import expert_axes, traffic_of
from shardwright.cost.steps.flops import step_flops
from shardwright.cost.wording import seconds_text


def products(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """A warning if the program has more flops than the plan; by component where the program has names."""
    del agreement
    compiled = program.flops_per_device
    if compiled is None:
        return
    planned = _by_component(plan)
    needed = sum(planned.values())
    if not needed or compiled <= (1 + FLOPS_WARNING_SHARE.value) * needed:
        return
    named = {name: flops for name, flops in program.component_flops.items() if flops > planned.get(name, 0.0)}
    worst = sorted(named, key=lambda name: planned.get(name, 0.0) - named[name])
    lines = "".join(f"\n'{name}': {_flops(named[name])} of {_flops(planned.get(name, 0.0))}" for name in worst[:3])
    remat = plan.request.remat
    yield Finding(
        code="SW307",
        severity="warning",
        where=f"'{worst[0]}'" if worst else f"a step of {plan.request.table.name}",
        found=f"{_flops(compiled)} a device and step, {percent(compiled / needed)} of what the plan counts{lines}",
        needed=f"{_flops(needed)}: the model's products over {plan.mesh.num_devices} devices, as far as the layout "
        f"divides them, with recomputation '{remat}'",
        cost=_cost(plan, compiled - needed),
    )


def _by_component(plan: Plan) -> Mapping[str, float]:
    """Flops of a step by component; experts with the full capacity of their buffers, which a program multiplies too."""
    work: dict[str, float] = {}
    for (component, _), flops in step_flops(plan).items():
        work[component] = work.get(component, 0.0) + flops
    if "moe" in work and expert_axes(plan.request.layout, plan.mesh):
        traffic = traffic_of(plan.request, plan.mesh)
        work["moe"] *= max(1.0, traffic.buffer_rows(plan.request.expert_buffer) / traffic.assignments)
    return work


def _cost(plan: Plan, more: float) -> str:
    step = plan.step
    flops_text = f"{_flops(more)} a device and step more"
    if step is None or not step.flops_per_device:
        return flops_text
    return f"{flops_text}, about {seconds_text(more * step.compute_seconds / step.flops_per_device)}"


def _flops(number: float) -> str:
    """
    >>> _flops(2.5e12), _flops(3_000_000), _flops(12)
    ('2.50 Tflop', '3.00 Mflop', '12.0 flop')
    """
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return (
                f"{number / factor:.3g} {unit}flop" if number >= 100 * factor else f"{number / factor:.2f} {unit}flop"
            )
    return f"{number:.1f} flop"
