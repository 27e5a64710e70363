"""SW312: the memory that a device needs, against what its chip lets a program use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

from shardwright.core.checks.edits import both, devices, entry, option, resized
from shardwright.core.checks.rows import rows_to_divide
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import MEMORY_WARNING_SHARE
from shardwright.core.layout.wording import bytes_text, percent, with_article
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.core.policies.policy import BASES
from shardwright.core.resolution.mesh_sizes import is_automatic, resized_mesh


def memory(plan: Plan) -> Iterator[Draft]:
    """An error above what the chip lets a program use, a warning where the estimate is within its uncertainty of it."""
    chip, held = plan.request.chip, plan.memory
    if chip is None:
        return
    total = held.total_bytes_per_device
    share = total / chip.usable_bytes
    if share < MEMORY_WARNING_SHARE.value:
        return
    rows = {
        "weights": held.weights_bytes,
        "gradients": held.gradients_bytes,
        "optimizer": held.optimizer_bytes,
        **({"average": held.average_bytes} if held.average_bytes else {}),
        **({"amaxes": held.amax_history_bytes} if held.amax_history_bytes else {}),
        "activations": held.activations_bytes,
    }
    table = "\n".join(f"{name:<11}  {bytes_text(size, like=total)}" for name, size in rows.items())
    yield Draft(
        finding=Finding(
            code="SW312",
            severity="error" if share > 1 else "warning",
            where=f"a device of {plan.request.table.name} under layout '{plan.request.layout.name}'",
            found=f"{bytes_text(total)}, {percent(share)} of what {with_article(chip.name)} lets a program use\n{table}",
            needed=f"{bytes_text(chip.usable_bytes, like=total)} at most ({chip.source})"
            if share > 1
            else f"less than {percent(MEMORY_WARNING_SHARE.value)}: {MEMORY_WARNING_SHARE.why}",
            cost=f"{bytes_text(total - chip.usable_bytes)} a device too much" if share > 1 else "",
        ),
        candidates=tuple(cures(plan)),
    )


FACTORS = (2, 4, 8, 16, 32)


def cures(plan: Plan, elsewhere: Iterable[Candidate] = ()) -> Iterator[Candidate]:
    """Recompute more, compute the loss in chunks, use more microbatches, replicate less, take another layout (``elsewhere``), then use more
    devices; each alone, the cheapest first. Without microbatches and devices that are too few by the plan's own bytes."""
    request, mesh = plan.request, plan.mesh
    if request.remat != BASES[0]:
        yield option("remat", BASES[0])
    for factor in (8, 32):
        yield option("loss-chunks", request.loss_chunks * factor)
    for factor in divisors(rows_to_divide(plan) or 1):
        if 1 < factor <= FACTORS[-1] and _may_fit(plan, activations=factor):
            yield option("microbatches", request.microbatches * factor)
    for axis in mesh.larger_than_one(request.layout.entries):
        declared = request.layout.entries[axis]
        if declared.elsewhere == "data":
            if declared.optimizer is None:
                yield entry(plan, axis, optimizer="shard")
            yield from resized(plan, axis, 1, absorbing=("fsdp",))
            yield entry(plan, axis, elsewhere="fsdp")
    yield from elsewhere
    for factor in FACTORS:
        yield from _on_more_devices(plan, factor)


def _on_more_devices(plan: Plan, factor: int) -> Iterator[Candidate]:
    """The step on more devices along an axis that shards weights; with more rows where these have too few."""
    request, layout = plan.request, plan.request.layout
    automatic = any(is_automatic(request, axis) for axis in layout.mesh)
    growing = [axis for axis, one in layout.entries.items() if one.elsewhere == "fsdp" and not one.declared]
    changes: list[Candidate] = []
    if request.devices is None or not automatic:
        if not growing:
            return
        changes.append(resized_mesh(request, {growing[0]: plan.mesh.size(growing[0]) * factor}))
    rows = rows_to_divide(plan)
    # 0 where there is an error about rows, with a fix of its own.
    enough = rows % factor == 0
    if not enough:
        changes.append(option("batch", request.batch * factor))
    if request.devices is not None:
        changes.append(devices(request.devices * factor))
    if _may_fit(plan, state=factor, activations=factor if enough else 1):
        yield reduce(both, changes)


def _may_fit(plan: Plan, *, state: int = 1, activations: int = 1) -> bool:
    """Whether a device may hold what it has to if no more than such shares of it are left."""
    held, chip = plan.memory, plan.request.chip
    least = (held.state_bytes + held.gradients_bytes) / state + held.activations_bytes / activations
    return chip is None or least <= chip.usable_bytes
