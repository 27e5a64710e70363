"""The stages of a pipeline: a row for each rank, and its schedule as a picture of time."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.core.stages.notation import stages_text
from shardwright.core.stages.planned import Pipeline
from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph
from shardwright.report.text.units import pretty_bytes, several

MOST_ROWS = 32
"""Ranks that are drawn: the first and the last ones of more."""


def pipeline_table(pipeline: Pipeline, width: int) -> RenderableType:
    """Each rank with its units and its memory; the worst ones are named."""
    choice = pipeline.choice
    columns = [
        Column(header="rank", right=True),
        Column(header="units"),
        Column(header="live", right=True),
        Column(header="stored", right=True),
        Column(header="activations", right=True),
        Column(header="total", right=True),
        Column(header="busy", right=True),
        Column(header="", flexible=True),
    ]
    rows = []
    shown = range(choice.ranks)
    skipped = len(shown) > MOST_ROWS
    for rank in [r for r in shown if not skipped or r < MOST_ROWS // 2 or r >= choice.ranks - MOST_ROWS // 2]:
        stages = pipeline.of_rank(rank)
        total, activations = pipeline.total_bytes(rank), pipeline.activations_bytes(rank)
        notes = [
            text
            for worst, text in ((pipeline.fullest, "most memory"), (pipeline.slowest, "most work"))
            if worst == rank
        ]
        rows.append(
            [
                Text(str(rank)),
                Text(_units([stage.stage.letters for stage in stages])),
                Text(str(pipeline.run.most_live[rank])),
                Text(pretty_bytes(total - activations)),
                Text(pretty_bytes(activations)),
                Text(pretty_bytes(total), style="bold" if notes else ""),
                Text(f"{pipeline.run.busy[rank] / pipeline.run.seconds:.1%}"),
                Text(", ".join(notes), style="dim"),
            ]
        )
    left_out = f"; {choice.ranks - MOST_ROWS} ranks in the middle are left out" if skipped else ""
    about = SCHEDULES[choice.schedule].about
    lines = [
        f"{choice.schedule}: {about}",
        f"{several(choice.num_stages, 'stage')} {choice.text}",
        "units as given" if choice.by == "given" else f"units shared out by {choice.by}",
        f"ranks wait for {pipeline.idle_share:.1%} of the time{left_out}",
        *_shared(pipeline),
    ]
    return Group(
        *map(paragraph, lines),
        Text(""),
        aligned(columns, [RowGroup(cells=rows)], width),
    )


def _shared(pipeline: Pipeline) -> list[str]:
    if pipeline.shared is None:
        return []
    names = {"E": "the embedding", "L": "the logits"}
    what = " and ".join(names[letter] for letter in pipeline.shared.letters)
    return [f"all stages share {what}: {pretty_bytes(pipeline.shared.stored_bytes)} stored on each device"]


def _units(stages: list[str]) -> str:
    """The units of a rank's stages. More than three alike are counted.

    >>> _units(["Et", "tt", "tt"]), _units(["Et", *["tt"] * 7])
    ('Et  tt  tt', 'Et  tt x 7')
    """
    found: list[str] = []
    for letters, run in groupby(stages):
        number = len(list(run))
        text = stages_text([letters])
        found += [f"{text} x {number}"] if number > 3 else [text] * number
    return "  ".join(found)
