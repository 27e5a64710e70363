"""`shardwright compile --engine torch`: a dry run of the step by PyTorch without devices or values, compared with its plan."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from shardwright.cli.running.compiled import Compiled
from shardwright.cli.typed.extras import needing_extra
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.findings import compiled_findings
from shardwright.compiled.findings.memory import chip_memory
from shardwright.compiled.findings.unmatched import unmatched
from shardwright.compiled.reading.program import (
    CompiledCollective,
    CompiledMemory,
    CompiledProgram,
    RankMemory,
)
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import worst_first
from shardwright.core.plan.plan import Plan
from shardwright.cost import Machine
from shardwright.cost.advice import settling_on
from shardwright.training.named import OURS
from shardwright.training.optimizers import is_own

EVEN = "assumes that every expert gets the same number of rows"


def compile_by_dry_run(plan: Plan, machine: Machine | None = None, keep_text: Path | None = None) -> Compiled:
    """A dry run of the plan's step on rank 0 of its mesh, compared with the plan.

    Raises InputError for ``keep_text``: PyTorch compiles no program, so there is no text. So it does for an optimizer of
    PyTorch by its name there.
    """
    if keep_text is not None:
        raise InputError(
            "--hlo: PyTorch compiles no program, so there is no text. Leave --hlo out, or use --engine jax."
        )
    if is_own(plan.request.optimizer):
        raise InputError(
            f"--optimizer {plan.request.optimizer.name}: there is no dry run of it, because its step reads the number of "
            f"steps. `plan` has its bytes. {OURS}"
        )
    from shardwright.report.compile.compile_progress import compile_progress

    with needing_extra("torch", "a step of PyTorch"):
        dry_run = import_module("shardwright.engine_torch.dry_run.dry_run").dry_run
    target = f"torch:fake x {plan.mesh.num_devices}"
    with compile_progress() as doing:
        doing(f"dry run of a step of {plan.request.table.name} as one of {plan.mesh.num_devices} ranks")
        began = perf_counter()
        program = _program(target, dry_run(plan), began)
    agreement = agree(plan, program)
    findings = compiled_findings(plan, program, agreement, settling_on(plan, machine), (unmatched, chip_memory))
    return Compiled(plan=plan, program=program, agreement=agreement, findings=worst_first((*plan.findings, *findings)))


def _program(target: str, run: Any, began: float) -> CompiledProgram:
    """The dry run in the form of a compiled program. The state is an argument, and the output aliases it."""
    state = run.weights_bytes + run.moments_bytes + run.average_bytes
    given = state + run.batch_bytes
    return CompiledProgram(
        target=target,
        collectives=tuple(
            CompiledCollective(
                kind=one.kind,
                axes=one.axes,
                bytes_per_device=one.bytes_per_device,
                count_per_step=count,
                dtypes=one.dtypes,
                component=one.component,
                phase=one.phase,
                tensors=one.tensors,
                source=one.source,
                ragged=one.ragged,
                group_size=one.group_size,
            )
            for one, count in run.collectives
        ),
        memory=CompiledMemory(
            arguments_bytes=given,
            temporaries_bytes=run.peak_bytes - given,
            output_bytes=state,
            aliased_bytes=state,
            peak_bytes=run.peak_bytes,
            host_bytes=run.host_bytes,
            plan_bytes={
                "weights_bytes": run.weights_bytes,
                "gradients_bytes": run.gradients_bytes,
                "optimizer_bytes": run.moments_bytes,
                **({"average_bytes": run.average_bytes} if run.average_bytes else {}),
                "activations_bytes": run.peak_bytes - state - run.gradients_bytes,
            },
        ),
        compile_seconds=perf_counter() - began,
        notes=(EVEN,) if run.even else (),
        ranks=tuple(
            RankMemory(
                rank=one.rank,
                units=one.units,
                peak_bytes=one.found.peak_bytes,
                planned_bytes=one.planned_bytes,
                planned_even_bytes=one.planned_even_bytes,
            )
            for one in run.ranks
        ),
        planned_even_bytes=run.planned_even_bytes,
    )
