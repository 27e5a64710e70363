"""SW310, SW311 and SW312: state that is held twice, logits as the largest temporary, and more than the chip has."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.widths import width
from shardwright.compiled.findings.fixes import Fixable
from shardwright.compiled.reading.program import CompiledProgram, Temporary
from shardwright.core.checks.edits import option
from shardwright.core.checks.memory import cures
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import DONATED_SHARE
from shardwright.core.layout.wording import bytes_text, percent, with_article
from shardwright.core.plan.plan import Plan


def donation(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """SW310: weights and moments that a step does not write into the buffers of its inputs."""
    del agreement
    state = plan.memory.state_bytes
    shared = program.memory.aliased_bytes
    if shared >= DONATED_SHARE.value * state:
        return
    yield Finding(
        code="SW310",
        severity="warning",
        where=f"the state of {plan.request.table.name}: weights and moments",
        found=f"{bytes_text(shared, like=state) if shared else 'nothing'} of it in the buffers of the inputs ({percent(shared / state)})",
        needed=f"{bytes_text(state)}: the state donated to the step (donate_argnums), with equal shardings on both sides",
        cost=f"{bytes_text(state - shared)} a device held twice",
    )


def scores(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Fixable]:
    """SW311: the largest temporary has the size of the logits, tokens by vocabulary entries."""
    del agreement
    if not program.memory.largest:
        return
    largest = max(program.memory.largest, key=lambda one: one.bytes_per_device)
    row = plan.by_name.get(plan.request.table.names.scores)
    if row is None or not _has_scores(plan, largest):
        return
    peak = program.memory.peak_bytes
    shape = "x".join(map(str, largest.shape))

    def smaller(changed: Plan) -> bool:
        return _score_bytes(changed) < _score_bytes(plan)

    finding = Finding(
        code="SW311",
        severity="info",
        where="'logits': the largest temporary" + (f", at {largest.source}" if largest.source else ""),
        tensor=row.name,
        found=f"{largest.dtype} {shape}, {bytes_text(largest.bytes_per_device)}: tokens by vocabulary entries, "
        f"{percent(largest.bytes_per_device / peak)} of the peak",
        needed="fewer tokens or fewer entries at a time",
        cost=f"{bytes_text(largest.bytes_per_device)} a device",
    )
    candidates = tuple(
        option(flag, getattr(plan.request, flag.replace("-", "_")) * factor)
        for flag in ("loss-chunks", "microbatches")
        for factor in (8, 4, 2)
    )
    yield Fixable(draft=Draft(finding=finding, candidates=candidates), holds=smaller)


def _has_scores(plan: Plan, one: Temporary) -> bool:
    """Whether a temporary has a vocabulary dim, unsharded or the local shard, and the tokens of a device."""
    row = plan.by_name[plan.request.table.names.scores]
    if one.shape in {weight.shape for weight in plan.weights}:
        return False
    vocabulary = row.shape[-1]
    own = vocabulary // plan.mesh.size(row.in_use.axes_of("vocab"))
    entries = [size for size in (vocabulary, own) if size in one.shape]
    tokens = row.bytes_per_device // width(row.dtype) // own // plan.request.microbatches // plan.request.loss_chunks
    return bool(entries) and prod(one.shape) >= tokens * entries[0]


def _score_bytes(plan: Plan) -> float:
    return (
        plan.by_name[plan.request.table.names.scores].bytes_per_device
        / plan.request.microbatches
        / plan.request.loss_chunks
    )


def chip_memory(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Fixable]:
    """SW312: the program's peak above what its chip lets a program use."""
    del agreement
    memory = program.memory
    rows = {
        "arguments": memory.arguments_bytes,
        "temporaries": memory.temporaries_bytes,
        "output": memory.output_bytes,
        "aliased with arguments": -memory.aliased_bytes,
    }
    yield from too_large(plan, memory.peak_bytes, rows)


def too_large(plan: Plan, held: int, rows: dict[str, int], usable: int | None = None) -> Iterator[Fixable]:
    """SW312 for a program that needs ``held`` bytes of a device; ``usable``: the compiler's limit, else the chip's."""
    chip = plan.request.chip
    if usable is None:
        if chip is None:
            return
        usable = chip.usable_bytes
    if held <= usable:
        return
    kind = "a chip" if chip is None else with_article(chip.name)
    long = max((len(name) for name in rows), default=0)
    table = "".join(
        f"\n{name:<{long}}  {'-' if size < 0 else ''}{bytes_text(abs(size), like=held)}" for name, size in rows.items()
    )
    predicted = plan.memory.total_bytes_per_device
    finding = Finding(
        code="SW312",
        severity="error",
        where=f"the compiled step of {plan.request.table.name} under layout '{plan.request.layout.name}'",
        found=f"{bytes_text(held)} at its peak, {percent(held / usable)} of what {kind} lets a program use; "
        f"the plan expects {bytes_text(predicted, like=held)}{table}",
        needed=f"{bytes_text(usable, like=held)} at most" + (f" ({chip.source})" if chip else ""),
        cost=f"{bytes_text(held - usable)} a device too much",
    )

    def fits(changed: Plan) -> bool:
        # The memory that the compiler needs beyond the plan is assumed not to change.
        return changed.memory.total_bytes_per_device + max(0, held - predicted) <= usable

    yield Fixable(draft=Draft(finding=finding, candidates=tuple(cures(plan))), holds=fits)
