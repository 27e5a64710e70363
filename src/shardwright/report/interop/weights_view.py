"""Views of weights that were imported or exported, and the progress of that."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from shardwright.interop.hugging_face.weights.exporting import Exported
from shardwright.interop.hugging_face.weights.importing import Imported
from shardwright.report.plan.findings_view import findings_list
from shardwright.report.text.columns import labelled
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several

SECONDS_PER_LINE = 10


def imported_view(imported: Imported) -> View:
    """The checkpoint that was written, its model, and what was left out."""

    def view(width: int) -> RenderableType:
        weights = (
            f"{several(imported.num_published, 'published tensor')} as {imported.num_tensors:,} of ours, "
            f"{pretty_bytes(imported.num_bytes)} in {', '.join(imported.dtypes)}"
        )
        lines = [("model", imported.model.command), ("weights", weights)]
        if imported.block is not None:
            rows, columns = imported.block
            fp8 = f"{several(imported.num_dequantized, 'tensor')} of FP8, with a scale for each {rows} x {columns}"
            lines.append(("dequantised", fp8))
        for one in imported.left_out:
            lines.append(("left out", f"{several(len(one.names), 'tensor')} as '{one.names[0]}': {one.why}"))
        if imported.kept_fp8:
            lines.append(("kept", f"codes and scales of {several(imported.kept_fp8, 'tensor')} in FP8"))
        lines += _beside(imported.kept, imported.files)
        drawn = headed(f"imported to {imported.directory}", lines, width)
        return Group(drawn, *([findings_list(imported.findings, width)] if imported.findings else []))

    return view


def exported_view(exported: Exported) -> View:
    """The folder that was written, its model, and what was left out."""

    def view(width: int) -> RenderableType:
        config = "none: no class of transformers is known for this architecture. Add the model's own"
        if exported.model.config_is_written:
            config = "written from the architecture; the ids of special tokens are null"
        elif exported.model.config is not None:
            config = ", ".join(["copied", *exported.config_changes])
        weights = (
            f"{several(exported.num_tensors, 'published tensor')}, {pretty_bytes(exported.num_bytes)} in "
            f"{several(exported.num_files, 'file')}"
        )
        lines = [("from", str(exported.directory)), ("model", exported.model.command), ("weights", weights)]
        if exported.fp8_block is not None:
            rows, columns = exported.fp8_block
            several_fp8 = several(exported.fp8_kept + exported.fp8_quantized, "tensor")
            made = f"{exported.fp8_kept:,} as they were imported, {exported.fp8_quantized:,} quantized"
            lines.append(("FP8", f"{several_fp8} with a scale for each {rows} x {columns}: {made}"))
        lines.append(("config.json", config))
        lines += _beside(exported.kept, exported.files)
        if exported.missing_prediction:
            layers = several(exported.missing_prediction, "layer")
            lines.append(("left out", f"{layers} for multi-token prediction: the checkpoint does not hold them"))
        if exported.average:
            lines.insert(3, ("", "the average of the weights"))
        if exported.averages:
            averages = several(exported.averages, "tensor")
            lines.append(("left out", f"{averages} of the average of the weights: --average exports it instead"))
        if exported.moments:
            lines.append(("left out", f"{several(exported.moments, 'tensor')} of the optimizer"))
        return headed(f"exported to {exported.folder}", lines, width)

    return view


def _beside(kept: Sequence[str], files: Sequence[str]) -> list[tuple[str, str]]:
    """What is beside the weights: other tensors and files."""
    lines = [("kept", f"{several(len(kept), 'tensor')} as '{kept[0]}', for multi-token prediction")] if kept else []
    return [*lines, *([("files", ", ".join(files))] if files else [])]


@contextmanager
def weights_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``progress(done, total)``, in bytes. A bar on a terminal; else a line now and then. Both go to standard error."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_PER_LINE:
                last = time.monotonic()
                print(f"{doing}: {pretty_bytes(done)} of {pretty_bytes(total)}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)

        def moved(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield moved


def headed(heading: str, lines: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """A heading, and lines of a label and a text."""
    return Group(Text(heading, style="bold"), labelled(lines, width))
