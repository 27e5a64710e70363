"""Text view of an imported MaxText configuration: the mesh, every tensor under its rules, and the layout in roles."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.mesh.mesh import Mesh
from shardwright.interop.maxtext.importing import MaxTextImport
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.rules import names_of
from shardwright.interop.maxtext.resolution.placement import Imported, Placed
from shardwright.interop.maxtext.stages import PipelineSettings
from shardwright.interop.maxtext.without_table import RulesAlone
from shardwright.report.interop.import_views import findings_section, heading, layout_section, plan_lines
from shardwright.report.text.columns import Column, RowGroup, aligned, section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several

DIALECTS = {"linen": "by Flax Linen", "nnx": "by MaxText's NNX", "flax-nnx": "by Flax NNX"}


MOST_NAMED = 40
"""The most keys of one source that are named; of more, their number is. All are in the JSON."""


def maxtext_view(found: MaxTextImport, *, written: bool = False) -> View:
    """Draws an import; tensors are grouped by component, in the order of the forward pass. ``written``: the layout is in a file."""

    def view(width: int) -> RenderableType:
        imported, comparison = found.imported, found.comparison
        colors = AxisColors.of(imported.mesh.shape)
        lines = {
            "model": imported.table.name,
            "mesh": _mesh(imported.mesh),
            "rules": f"{several(len(imported.rules), 'line')} for {several(len(names_of(imported.rules)), 'name')}, "
            f"resolved {DIALECTS[imported.dialect]}",
            "step": f"{several(imported.step.batch, 'row')} of {several(imported.step.length, 'token')}",
        }
        if found.pipeline is not None:
            lines["pipeline"] = _pipeline(found.pipeline)
        if found.remat is not None:
            lines["recomputed"] = f"--remat {found.remat}"
        if imported.configuration.not_read:
            lines["not read"] = f"{_not_read(imported.configuration)}: they change no layout"
        lines |= plan_lines(found.command, None if comparison is None else comparison.layout, written=written)
        sections = [heading(" + ".join(imported.configuration.sources), lines, found.chosen, width)]
        for title, tensors, per in (
            ("weights", imported.weights, "all layers, per device"),
            ("activations", imported.activations, "per layer and device"),
        ):
            sections.append(section(f"{title} under the rules, {per}", _table(imported, tensors, colors, width)))
        if comparison is not None:
            sections += layout_section(comparison.layout)
            same = comparison.compared - len(comparison.differences)
            reordered = sum(1 for each in comparison.differences if each.order)
            order = f"; {reordered} differ only in the order of axes on a dim" if reordered else ""
            sections.append(
                Text(f"{same} of {comparison.compared} tensors are sharded as the rules shard them{order}.\n")
            )
        return Group(*sections, *findings_section(found.findings, width))

    return view


def _not_read(configuration: Configuration) -> str:
    by_source: dict[str, list[str]] = {}
    for key, position in configuration.not_read.items():
        by_source.setdefault(position.source, []).append(key)
    parts = (
        ", ".join(keys) if len(keys) <= MOST_NAMED else f"{len(keys):,} other keys of {source}"
        for source, keys in by_source.items()
    )
    return ", ".join(parts)


def _pipeline(found: PipelineSettings) -> str:
    return (
        f"{several(found.layers, 'layer')}: {several(found.stages, 'stage')} x {several(found.layers_per_stage, 'layer')} x "
        f"{several(found.repeats, 'repeat')}, {several(found.microbatches, 'microbatch')}"
    )


def rules_view(found: RulesAlone) -> View:
    """The weights of a model without a table, by their names."""

    def view(width: int) -> RenderableType:
        lines = {"mesh": _mesh(found.mesh)}
        if found.configuration.not_read:
            lines["not read"] = f"{_not_read(found.configuration)}: they change no layout"
        colors = AxisColors.of(found.mesh.shape)
        columns = [Column(header="weight"), Column(header="names and axes", flexible=True)]
        cells = [[Text(weight), colors.spec(spec)] for weight, spec in found.specs.items()]
        return Group(
            heading(" + ".join(found.configuration.sources), lines, found.chosen, width),
            section("weights under the rules, by their names", aligned(columns, [RowGroup(cells=cells)], width)),
            *findings_section(found.findings, width),
        )

    return view


def _mesh(mesh: Mesh) -> str:
    larger = [f"{axis.name} {axis.size}" for axis in mesh.axes if axis.size > 1]
    ones = [axis.name for axis in mesh.axes if axis.size == 1]
    text = " x ".join(larger) + f" = {several(mesh.num_devices, 'device')}" if larger else "1 device"
    return text + (f"; of size 1: {', '.join(ones)}" if ones else "")


def _table(imported: Imported, tensors: Sequence[Placed], colors: AxisColors, width: int) -> RenderableType:
    columns = [
        Column(header="tensor"),
        Column(header="names and axes", flexible=True),
        Column(header="bytes", right=True),
    ]
    groups: dict[str, list[Placed]] = {}
    for placed in tensors:
        groups.setdefault(placed.tensor.component, []).append(placed)
    rows = [
        RowGroup(
            heading=Text(component, style="bold"),
            cells=[
                [
                    Text(_short(placed)),
                    colors.spec(placed.notation),
                    Text(pretty_bytes(placed.bytes_per_device(imported.mesh) / placed.tensor.num)),
                ]
                for placed in groups[component]
            ],
        )
        for component in sorted(groups, key=COMPONENTS.index)
    ]
    return aligned(columns, rows, width)


def _short(placed: Placed) -> str:
    """The name without its component, which is the heading of its group."""
    return placed.tensor.name.removeprefix(f"{placed.tensor.component}.")
