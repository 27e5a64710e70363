"""With --compile: the best answers of a search are compiled for their chips, each by a process of its own, and ranked by their programs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Literal

from shardwright.cli.reviewing.locked_program import versions
from shardwright.cli.running.compile import compile_plan, prepare, without_hardware
from shardwright.cli.running.compile_torch import compile_by_dry_run
from shardwright.cli.searching.apart import FailedApartError, call_apart
from shardwright.cli.searching.rows import Row
from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, requested
from shardwright.cli.typed.written import typed_options
from shardwright.compiled.links import Sent, sent_by_plan, sent_by_program
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.codes import TOO_LARGE
from shardwright.core.findings.errors import InputError
from shardwright.core.installed import installed_version
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.hardware.machine import Machine, read_machine
from shardwright.search.answers import loss_to
from shardwright.search.compiled import CompiledAnswer, CompileProgress, Held, ranked_again

Ended = Literal["complete", "budget", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """``rows``: all that are left, those with a program first. ``dropped``: those that do not fit or were not compiled, with why."""

    wanted: int
    rows: tuple[Row, ...]
    dropped: tuple[tuple[Row, CompiledAnswer], ...]
    ended: Ended
    seconds: float

    def to_json(self) -> dict[str, object]:
        return {
            "wanted": self.wanted,
            "compiled": sum(row.compiled is not None for row in self.rows),
            "ended": self.ended,
            "seconds": self.seconds,
            "dropped": [
                {
                    "layout": row.name,
                    "mesh": dict(row.sizes),
                    "planned_rank": row.answer.rank,
                    "command": row.command,
                    **answer.to_json(),
                }
                for row, answer in self.dropped
            ],
        }


def require_compiler(options: PlanOptions) -> None:
    """Raises InputError where this machine cannot compile for the chips of a search."""
    try:
        call_apart(load_compiler, (options,), lambda: True)
    except FailedApartError as error:
        raise InputError(f"--compile: {error.line}") from None


def compiled_rows(
    rows: Sequence[Row],
    wanted: int,
    model: str,
    *,
    memory: MutableMapping[str, CompiledAnswer],
    save: Callable[[], None],
    budget_s: float,
    report: Callable[[CompileProgress], None],
) -> Compilation:
    """Compiles rows in their order until ``wanted`` of them fit, an interrupt comes or the budget is used. ``memory``: what an earlier search of
    the same has compiled; it grows, and ``save`` is called then."""
    began = monotonic()
    ended: Ended = "complete"
    seconds: list[float] = []
    tried: list[tuple[Row, CompiledAnswer]] = []
    try:
        for row in rows:
            fits = sum(answer.state == "fits" for _, answer in tried)
            if fits == wanted:
                break
            key = _key(row, model)
            if key not in memory:
                mean_s = sum(seconds) / len(seconds) if seconds else None
                progress = CompileProgress(
                    number=fits + 1,
                    wanted=wanted,
                    text=row.text,
                    left_s=None if mean_s is None else mean_s * (wanted - fits),
                )
                answer = _compiled_apart(row, model, began + budget_s, progress, report)
                if answer is None:
                    ended = "budget"
                    break
                seconds.append(answer.compile_seconds)
                if answer.state == "failed":
                    tried.append((row, answer))
                    continue
                memory[key] = answer
                save()
            tried.append((row, memory[key]))
    except KeyboardInterrupt:
        ended = "interrupted"
    return Compilation(
        wanted=wanted,
        rows=_ranked(rows, tried),
        dropped=tuple((row, answer) for row, answer in tried if answer.state != "fits"),
        ended=ended,
        seconds=monotonic() - began,
    )


def _ranked(rows: Sequence[Row], tried: Sequence[tuple[Row, CompiledAnswer]]) -> tuple[Row, ...]:
    """Those with a program by what it holds and moves, then those that were not compiled."""
    fitting = [(row, answer) for row, answer in tried if answer.state == "fits"]
    ranks = ranked_again([answer for _, answer in fitting])
    ordered = [(rank, *fitting[number]) for rank, number in ranks]
    left = rows[len(tried) :]
    places = [*ordered, *((len(ordered) + place, row, None) for place, row in enumerate(left, start=1))]
    first = places[0][1] if places else None
    return tuple(
        replace(
            row,
            planned_rank=row.answer.rank,
            compiled=answer,
            answer=replace(row.answer, rank=rank, loss=loss_to(first.answer.plan, row.answer.plan) if first else None),
        )
        for rank, row, answer in places
    )


def _compiled_apart(
    row: Row,
    model: str,
    until: float,
    progress: CompileProgress,
    report: Callable[[CompileProgress], None],
) -> CompiledAnswer | None:
    """None where the time is over before it is compiled."""
    began = monotonic()

    def goes_on() -> bool:
        spent, left_s = monotonic() - began, progress.left_s
        report(progress if left_s is None else replace(progress, left_s=max(0.0, left_s - spent)))
        return monotonic() <= until

    if not goes_on():
        return None
    try:
        answer = call_apart(compile_answer, (model, row.name, row.file, row.options), goes_on)
    except FailedApartError as error:
        state = "too large" if TOO_LARGE in error.codes else "failed"
        return CompiledAnswer(state=state, line=error.line, compile_seconds=monotonic() - began)
    return None if answer is None else replace(answer, compile_seconds=monotonic() - began)


def _key(row: Row, model: str) -> str:
    """A digest of all that a program depends on."""
    options = row.options
    assert options.chips is not None
    packages = versions(read_machine(options.chips)) | {"torch": installed_version("torch")}
    content = [model, row.file or row.name, *typed_options(options), sorted(packages.items(), key=str)]
    return sha256(json.dumps(content).encode()).hexdigest()


def load_compiler(options: PlanOptions) -> bool:
    """In a process of its own: whether there is a compiler for the chips. Raises InputError where there is none."""
    assert options.chips is not None
    machine = read_machine(options.chips)
    if options.engine == "torch":
        with needing_extra("torch", "a step of PyTorch"):
            import_module("shardwright.engine_torch.dry_run.dry_run")
        return True
    without_hardware(os.environ, jax_is_loaded="jax" in sys.modules)
    with needing_extra("jax", "compiling"):
        import_module("shardwright.engine_jax.compile.target").devices_of(machine)
    return True


def compile_answer(model: str, layout: str, text: str | None, options: PlanOptions) -> CompiledAnswer:
    """In a process of its own: an answer compiled as `shardwright compile` does. ``text``: of its layout, where it is no preset. Raises
    InputError and FindingsError where there is no program."""
    prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        if text is not None:
            layout = str(Path(folder) / layout)
            Path(layout).write_text(text, encoding="utf-8")
        typed = requested(model, layout, options)
        plan = planned(typed)
    require_lowered(plan)
    machine = typed.machine
    assert machine is not None
    if plan.request.engine == "torch":
        program = compile_by_dry_run(plan, machine).program
    else:
        program = compile_plan(typed, plan, machine.text).program
    return _answer(plan, program, machine)


def _answer(plan: Plan, program: CompiledProgram, machine: Machine) -> CompiledAnswer:
    memory, mapping = program.memory, map_mesh(plan.mesh, machine)
    chip = plan.request.chip
    missing = 0 if chip is None else memory.peak_bytes - chip.usable_bytes
    # A dry run assumes an even routing, and the plan's buffers may have room for more.
    expected = program.planned_even_bytes or plan.memory.total_bytes_per_device
    exchanged = [sent for sent in plan.collectives if sent.ragged]
    buffers = sum(sent.bytes_per_device * sent.count_per_step for sent in program.collectives if sent.ragged) - sum(
        sent.bytes_per_device * sent.count_per_step for sent in exchanged
    )
    return CompiledAnswer(
        state="fits" if missing <= 0 else "too large",
        line=""
        if missing <= 0
        else f"{TOO_LARGE}: the program holds {bytes_text(memory.peak_bytes)} a device, {bytes_text(missing)} too much",
        compile_seconds=program.compile_seconds,
        planned=_held(expected, sent_by_plan(plan, mapping)),
        compiled=_held(memory.peak_bytes, sent_by_program(plan, program, mapping)),
        temporaries_bytes=memory.temporaries_bytes,
        buffers_bytes=max(0, buffers),
    )


def _held(memory_bytes: int, sent: Sent) -> Held:
    return Held(memory_bytes=memory_bytes, **asdict(sent))
