"""The memory of a compiled program, compared with the plan's, and its largest temporaries."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.compiled.reading.program import CompiledProgram, RankMemory, Temporary
from shardwright.core.plan.plan import Plan
from shardwright.core.stages.notation import stages_text
from shardwright.report.plan.memory_view import BAR, BAR_WIDTH
from shardwright.report.text.columns import GAP, INDENT, Column, RowGroup, aligned, paragraph
from shardwright.report.text.units import pretty_bytes

SHOWN = 10
"""The number of temporaries in the table."""

MOST_RANKS = 32
"""Ranks of a pipeline that are drawn: the first and the last ones of more."""


def compiled_memory_table(plan: Plan, program: CompiledProgram, width: int) -> RenderableType:
    """The plan's memory, then the program's. With chips, a full bar is a chip's usable memory."""
    predicted, compiled, chip = plan.memory, program.memory, plan.request.chip
    total, peak = predicted.total_bytes_per_device, compiled.peak_bytes
    full = max(1, total, peak, chip.usable_bytes if chip else 0)
    groups = {
        "predicted": [
            ("weights", predicted.weights_bytes),
            ("gradients", predicted.gradients_bytes),
            ("optimizer", predicted.optimizer_bytes),
            *([("average", predicted.average_bytes)] if predicted.average_bytes else []),
            *([("amax histories", predicted.amax_history_bytes)] if predicted.amax_history_bytes else []),
            ("activations, estimated", predicted.activations_bytes),
            ("total", total),
        ],
        f"compiled for {program.target}": [
            ("arguments", compiled.arguments_bytes),
            ("temporaries", compiled.temporaries_bytes),
            ("output", compiled.output_bytes),
            ("aliased with arguments", -compiled.aliased_bytes),
            ("peak", peak),
        ],
    }
    if chip:
        groups["chip"] = [(f"{chip.name} has", chip.usable_bytes)]
    names, numbers = zip(*(line for lines in groups.values() for line in lines), strict=True)
    used = (
        2 * INDENT
        + max(map(len, names))
        + GAP
        + max(len(f"{number:,}") for number in numbers)
        + GAP
        + max(len(pretty_bytes(number)) for number in numbers)
        + GAP
    )
    longest = max(1, min(BAR_WIDTH, width - used))
    rows = []
    for heading, lines in groups.items():
        cells = []
        for name, number in lines:
            style = "bold" if name in ("total", "peak") else ""
            bar = Text(BAR * round(longest * max(0, number) / full), style="cyan")
            cells.append([Text(name, style=style), Text(f"{number:,}", style=style), Text(pretty_bytes(number)), bar])
        rows.append(RowGroup(heading=Text(heading, style="dim"), cells=cells))
    columns = [Column(header="part"), Column(header="bytes", right=True), Column(header="", right=True)]
    columns.append(Column(header="", flexible=True))
    text = f"The plan's total is {_above(total, peak)} the peak"
    text += f", which is {peak / chip.usable_bytes:.1%} of what the chip has." if chip else "."
    if (even := program.planned_even_bytes) is not None:
        text += (
            f" It is that of the worst case of routing. With as many rows for every expert, as here, it is {pretty_bytes(even)}, "
            f"{_above(even, peak)} the peak."
        )
    # To a simulated device the host's memory is its own.
    if predicted.host_bytes and not program.target.startswith("cpu:"):
        text += (
            f" In the host's memory: {pretty_bytes(compiled.host_bytes)}, planned {pretty_bytes(predicted.host_bytes)}."
        )
    return Group(aligned(columns, rows, width), Text(""), paragraph(text, "dim"))


def _above(planned: int, peak: int) -> str:
    error = (planned - peak) / peak if peak else 0.0
    return f"{abs(error):.1%} {'above' if error >= 0 else 'below'}"


def ranks_table(ranks: Sequence[RankMemory], width: int) -> RenderableType:
    """The peak of each rank of a pipeline beside the plan's; where that is more for the worst case of routing, beside both."""
    even = any(one.planned_even_bytes is not None for one in ranks)
    columns = [
        Column(header="rank", right=True),
        Column(header="units"),
        Column(header="planned", right=True),
        *([Column(header="with even routing", right=True)] if even else []),
        Column(header="dry run", right=True),
        Column(header="of that" if even else "of the plan", right=True),
    ]
    shown = [
        one
        for one in ranks
        if len(ranks) <= MOST_RANKS or not MOST_RANKS // 2 <= one.rank < len(ranks) - MOST_RANKS // 2
    ]
    rows = []
    for one in shown:
        same = one.planned_bytes if one.planned_even_bytes is None else one.planned_even_bytes
        rows.append(
            [
                Text(str(one.rank)),
                Text("  ".join(stages_text([letters]) for letters in one.units)),
                Text(pretty_bytes(one.planned_bytes)),
                *([Text(pretty_bytes(same))] if even else []),
                Text(pretty_bytes(one.peak_bytes)),
                Text(f"{one.peak_bytes / same:.1%}"),
            ]
        )
    left_out = len(ranks) - len(shown)
    lines = [paragraph(f"{left_out} ranks in the middle are left out", "dim")]
    return Group(aligned(columns, [RowGroup(cells=rows)], width), *(lines if left_out else []))


def temporaries_table(program: CompiledProgram, width: int) -> RenderableType:
    """The largest first: bytes, dtype and shape, component and phase, the operation that makes it, and its source line."""
    largest = sorted(program.memory.largest, key=lambda one: -one.bytes_per_device)[:SHOWN]
    columns = [Column(header="", right=True), Column(header="what"), Column(header="whose"), Column(header="made by")]
    columns.append(Column(header="at", flexible=True))
    return aligned(columns, [RowGroup(cells=[_temporary(one) for one in largest])], width)


def _temporary(one: Temporary) -> list[Text]:
    shape = "x".join(map(str, one.shape)) or "one number"
    whose = "\n".join(word for word in (one.component, one.phase) if word)
    return [
        Text(pretty_bytes(one.bytes_per_device)),
        Text(f"{one.dtype}\n{shape}"),
        Text(whose),
        Text(one.op),
        Text(one.source or "", style="dim"),
    ]
