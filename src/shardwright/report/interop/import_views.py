"""Text views of an import: the layout as a layout file, degrees and ranks, and a model's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Layout
from shardwright.interop.hugging_face.command import command
from shardwright.interop.hugging_face.importing import HuggingFaceImport
from shardwright.interop.layout_text import layout_text
from shardwright.interop.torchtitan.importing import TorchTitanImport
from shardwright.interop.torchtitan.rows import StepRows
from shardwright.report.plan.findings_view import counted, findings_list
from shardwright.report.text.columns import INDENT, Column, RowGroup, aligned, labelled, section
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_count, several


def torchtitan_view(found: TorchTitanImport, source: str, *, written: bool = False) -> View:
    """Degrees, the groups of rank 0, and the layout. ``written``: it is in a file."""

    def view(width: int) -> RenderableType:
        sizes = {**found.degrees.sizes, "ep": found.degrees.ep}
        lines = {
            "degrees": " x ".join(f"{axis} {size}" for axis, size in found.degrees.sizes.items())
            + f" = {several(found.degrees.world, 'rank')}; ep {sizes['ep']}",
            "mesh": str(found.mesh or ""),
            "step": "" if found.rows is None else _step(found.rows),
            "stages": _stages(found),
            "recomputed": found.remat or "",
            "model": _model_of(found),
            "not read": not_read(found.not_read),
            **plan_lines(found.command, found.layout, written=written),
        }
        sections = [heading(source, lines, found.chosen, width)]
        groups = {name: ranks for name, ranks in found.groups.items() if len(ranks) > 1}
        if groups:
            cells = [[Text(name), Text(_ranks(ranks))] for name, ranks in groups.items()]
            columns = [Column(header="group"), Column(header="ranks in the group of rank 0", flexible=True)]
            sections.append(section("groups", aligned(columns, [RowGroup(cells=cells)], width)))
        return Group(*sections, *layout_section(found.layout), *findings_section(found.findings, width))

    return view


def plan_lines(command: str | None, layout: Layout | None, *, written: bool) -> Mapping[str, str]:
    """The command that plans the same, and the option that writes the layout which it names."""
    if command is None or layout is None:
        return {}
    return {"plan it": command, **({} if written else {"its layout": f"--out {layout.name}.yaml writes it"})}


def not_read(options: Sequence[str]) -> str:
    return f"{', '.join(options)}: nothing here follows from them" if options else ""


def _stages(found: TorchTitanImport) -> str:
    """The schedule, and the units as they are given to a plan."""
    if found.stages is None:
        return ""
    units = "" if found.stages.units is None else f": --stages '{found.stages.units}'"
    return f"{found.stages.schedule}, {found.stages.virtual} a rank{units}"


def _step(rows: StepRows) -> str:
    """The rows of a step, and how many each rank has."""
    own = rows.batch // rows.ranks // rows.microbatches
    per_rank = f"{own:,} on each of {several(rows.ranks, 'data-parallel rank')}" if rows.ranks > 1 else ""
    passes = f"{several(rows.microbatches, 'microbatch')}" if rows.microbatches > 1 else ""
    return ", ".join(
        [f"{several(rows.batch, 'row')} of {several(rows.length, 'token')}", *filter(None, (passes, per_rank))]
    )


def _model_of(found: TorchTitanImport) -> str:
    """The model that was planned, and TorchTitan's name of the file's model."""
    planned = found.plan.request.table.name if found.plan else ""
    own = " ".join(found.model or ())
    return f"{planned} (TorchTitan's {own})" if planned and own else planned or (own and f"TorchTitan's {own}")


def hugging_face_view(found: HuggingFaceImport) -> View:
    """The model's family, size and weights, the command that plans it, and the layout of its tensor-parallel plan."""

    def view(width: int) -> RenderableType:
        table = found.table
        lines = {
            "family": table.family,
            "parameters": f"{table.num_parameters:,} ({pretty_count(table.num_parameters)}), "
            f"{several(table.num_layers, 'layer')}",
            "plan it": f"shardwright plan {command(found.model)}" if found.model else "",
        }
        sections = [heading(table.name, lines, {}, width)]
        cells = [
            [
                Text(weight.name),
                Text(f"x{weight.num}" if weight.num > 1 else ""),
                Text("x".join(map(str, weight.shape))),
                Text(" ".join(weight.logical_axes)),
            ]
            for weight in table.weights
        ]
        columns = [
            Column(header="weight"),
            Column(header=""),
            Column(header="shape"),
            Column(header="dims", flexible=True),
        ]
        if found.model is not None:
            sections.append(section("weights", aligned(columns, [RowGroup(cells=cells)], width)))
        return Group(*sections, *layout_section(found.layout), *findings_section(found.findings, width))

    return view


def heading(title: str, lines: Mapping[str, str], chosen: Mapping[str, str], width: int) -> RenderableType:
    """A title, labelled lines, and the defaults that were chosen."""
    shown = dict(lines)
    if chosen:
        shown["by default"] = " ".join(f"{option} {value}" for option, value in chosen.items())
    return Group(Text(title, style="bold"), labelled(shown.items(), width), Text(""))


def layout_section(layout: Layout | None) -> Sequence[RenderableType]:
    """The layout as the text of a layout file."""
    if layout is None:
        return ()
    lines = (Text(f"{' ' * INDENT}{line}", no_wrap=True) for line in layout_text(layout).splitlines())
    return (section("in roles", *lines),)


def findings_section(findings: Sequence[Finding], width: int) -> Sequence[RenderableType]:
    """The findings. They are last, next to the prompt."""
    title = Text.assemble(("findings", "bold"), f": {counted(findings)}")
    return (title, *([Text(""), findings_list(findings, width)] if findings else []))


def _ranks(ranks: Sequence[int]) -> str:
    """All ranks up to 16; of more, the first eight and the last."""
    if len(ranks) <= 16:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:8]))}, ..., {ranks[-1]} ({len(ranks)} of them)"
