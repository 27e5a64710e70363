"""Answers of a search as what a user types: a preset or a layout file, and the options of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.written import typed_options
from shardwright.core.layout.layout import Layout
from shardwright.core.resolution.mesh_sizes import mesh_text
from shardwright.interop.layout_text import layout_text
from shardwright.search.answers import Answered
from shardwright.search.compiled import CompiledAnswer
from shardwright.search.space.forms import preset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An answer. ``file``: the text of its layout, where no preset is the same; ``words``: the command that plans it, ``options``: its options.
    ``planned_rank``: before it was ranked again by ``compiled``; None where nothing was compiled."""

    answer: Answered
    name: str
    sizes: Mapping[str, int]
    words: Sequence[str]
    options: PlanOptions
    file: str | None = None
    planned_rank: int | None = None
    compiled: CompiledAnswer | None = None

    @property
    def command(self) -> str:
        return shlex.join(self.words)

    @property
    def text(self) -> str:
        return f"{self.name} {mesh_text({axis: size for axis, size in self.sizes.items() if size > 1})}".rstrip()

    def to_json(self) -> dict[str, object]:
        plan, node = self.answer.plan, self.answer.node
        return {
            "rank": self.answer.rank,
            "layout": self.name,
            "mesh": dict(self.sizes),
            "command": self.command,
            "layout_file": self.file,
            "setting": {"remat": node.setting.remat, "microbatches": node.setting.microbatches},
            "answer": None if plan.answer is None else plan.answer.to_json(),
            "bytes_between_domains": self.answer.bytes_between,
            "unbeaten": self.answer.unbeaten,
            "loses": None if self.answer.loss is None else self.answer.loss.to_json(),
            **({} if self.planned_rank is None else {"planned_rank": self.planned_rank}),
            **({} if self.compiled is None else {"compiled": self.compiled.to_json()}),
        }


def rows_of(
    answers: Iterable[Answered], model: str, options: PlanOptions, presets: Sequence[Layout], folder: Path | None
) -> tuple[Row, ...]:
    """The rows of answers. ``options``: those of the search, with what it chose for all. ``folder``: where the files of layouts that are no
    presets are; None: in the working directory."""
    texts: dict[str, str] = {}
    rows: list[Row] = []
    for answer in answers:
        request = answer.plan.request
        layout, preset = request.layout, preset_of(request.layout, presets)
        if preset is None:
            layout = replace(layout, name=_name(layout, texts))
            texts[layout.name] = layout_text(layout)
        sizes = dict.fromkeys((layout if preset is None else preset).mesh, 1) | dict(answer.plan.mesh.shape)
        name = f"{layout.name}.yaml" if preset is None else preset.name
        typed = _options(options, answer, sizes)
        path = name if preset is not None else f"{'.' if folder is None else folder}/{name}"
        rows.append(
            Row(
                answer=answer,
                name=name,
                sizes=sizes,
                words=(
                    "shardwright",
                    "plan",
                    model,
                    "--layout",
                    path,
                    *typed_options(typed),
                ),
                options=typed,
                file=None if preset is not None else texts[layout.name],
            )
        )
    return tuple(rows)


def _name(layout: Layout, texts: Mapping[str, str]) -> str:
    """The layout's axes, and a number where another layout of the same axes has the name."""
    number = 1
    while True:
        name = layout.name if number == 1 else f"{layout.name}-{number}"
        if texts.get(name) in (None, layout_text(replace(layout, name=name))):
            return name
        number += 1


def _options(options: PlanOptions, answer: Answered, sizes: Mapping[str, int]) -> PlanOptions:
    """The options of the search with what an answer has chosen. Movements are in its layout."""
    request, setting = answer.plan.request, answer.node.setting
    return replace(
        options,
        mesh=mesh_text({axis: sizes[axis] for axis in sizes}),
        move=None,
        batch=request.batch,
        length=request.length,
        remat=None if request.remat == "full" else request.remat,
        microbatches=None if request.microbatches == 1 else request.microbatches,
        loss_chunks=None if request.loss_chunks == 1 else request.loss_chunks,
        schedule=request.schedule,
        precision=setting.precision or None,
        json=False,
    )
