"""SW308: collectives of a wider dtype than the plan's."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import per_tensor, total
from shardwright.compiled.agreement.rewrites import axes_in_order, family
from shardwright.compiled.agreement.widths import planned_dtype, widest_float, width
from shardwright.compiled.findings.wording import cost_of, of_tensors, place, several_times
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def dtypes(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """A warning for each component, kind and axes; information on CPU, which has no 16-bit collectives."""
    del agreement
    wanted: dict[tuple[str | None, str, tuple[str, ...]], str] = {}
    for one in plan.collectives:
        key = (one.component, one.kind, axes_in_order(plan.mesh, one.axes))
        dtype = widest_float([planned_dtype(plan, one), *([wanted[key]] if key in wanted else [])])
        if dtype is not None:
            wanted[key] = dtype
    rows = [row for one in program.collectives for row in per_tensor(one)]
    for key, dtype in wanted.items():
        wide = [
            one
            for one in rows
            if (one.component, one.kind, axes_in_order(plan.mesh, one.axes)) == key
            and width(widest_float(one.dtypes) or dtype) > width(dtype)
        ]
        if not wide:
            continue
        found = widest_float(name for one in wide for name in one.dtypes) or dtype
        moved, on_cpu = total(wide), family(program.target.split(":")[0]) == "cpu"
        yield Finding(
            code="SW308",
            severity="info" if on_cpu else "warning",
            where=place(*key),
            tensor=next((name for one in wide for name in one.tensors), None),
            found=f"{found}: {several_times(moved, sum(one.count_per_step for one in wide))}{of_tensors(wide)}",
            needed=f"{dtype}" + (", which XLA does not send on CPU: other targets do" if on_cpu else ""),
            cost=cost_of(plan, moved * (1 - width(dtype) / width(found)), key[2]),
        )
