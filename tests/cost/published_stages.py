"""Layouts with stages that others published, planned here: the table of docs/stages.md. Written by ``python -m tests.cost.published_stages``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import shardwright as sw
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.cost import price, read_machine
from shardwright.files import parse_yaml

PAGE = Path(__file__).parents[2] / "docs" / "stages.md"
BEGIN = "<!-- begin: python -m tests.cost.published_stages -->\n"
END = "<!-- end -->\n"
HEAD = "| model | chips | published | here | microbatches | units | idle | fullest rank | a chip has |\n|---|---|---|---|---:|---|---:|---:|---:|\n"

EXPERTS = "{elsewhere: fsdp, moe: expert}"
SEQUENCE = "sequence_parallel: true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``degrees``: as published, with the rows of a step. ``axes``: our mesh, major first, each with its size and role. ``units``: those that
    were published; None: shared out here."""

    model: str
    chips: str
    degrees: str
    axes: dict[str, tuple[int, str]]
    rows: int
    length: int
    microbatches: int
    units: str | None = None
    precision: str | None = None


CASES = (
    Published(
        model="deepseek3-671b",
        chips="h200:32x8",
        degrees="PP16 EP8, 2,048 rows",
        axes={"stage": (16, "stage"), "fsdp": (2, "fsdp"), "expert": (8, EXPERTS)},
        rows=2048,
        length=4096,
        microbatches=128,
    ),
    Published(
        model="deepseek3-671b",
        chips="b200:32x8",
        degrees="PP16 EP8, 2,048 rows",
        axes={"stage": (16, "stage"), "fsdp": (2, "fsdp"), "expert": (8, EXPERTS)},
        rows=2048,
        length=4096,
        microbatches=128,
    ),
    Published(
        model="deepseek3-671b",
        chips="b200:32x8",
        degrees="PP8 VP2 EP32 MXFP8, 2,048 rows",
        axes={"stage": (8, "{elsewhere: stage, virtual: 2, schedule: interleaved}"), "expert": (32, EXPERTS)},
        rows=2048,
        length=4096,
        microbatches=64,
        precision="mxfp8",
    ),
    Published(
        model="deepseek3-671b",
        chips="h100:128x8",
        degrees="TP2 PP8 VP4 EP64, 16,384 rows",
        axes={
            "stage": (8, "{elsewhere: stage, virtual: 4, schedule: interleaved}"),
            "fsdp": (2, "fsdp"),
            "expert": (32, EXPERTS),
            "tensor": (2, f"{{elsewhere: tensor, router: context, moe: expert, {SEQUENCE}}}"),
        },
        rows=16384,
        length=4096,
        microbatches=256,
        units="Et|(tt|)*30L",
    ),
    Published(
        model="llama3-405b",
        chips="h100:128x8",
        degrees="TP8 PP8 CP2 VP8 FP8, 1,536 rows of 8,192",
        axes={
            "stage": (8, "{elsewhere: stage, virtual: 8, schedule: interleaved}"),
            "fsdp": (8, "fsdp"),
            "context": (2, "context"),
            "tensor": (8, f"{{elsewhere: tensor, {SEQUENCE}}}"),
        },
        rows=1536,
        length=8192,
        microbatches=192,
        precision="fp8-current",
    ),
)


def layout_of(case: Published) -> Layout:
    sizes = ", ".join(f"{axis}: {size}" for axis, (size, _) in case.axes.items())
    roles = "".join(f"  {axis}: {role}\n" for axis, (_, role) in case.axes.items())
    return read_layout(parse_yaml(f"name: published\nmesh: {{{sizes}}}\nroles:\n{roles}", "published.yaml"))


def plan_of(case: Published) -> Plan:
    """The plan in the units that were published, or in those that are the fastest and fit."""
    machine = read_machine(case.chips)
    request = sw.Request(
        layout=layout_of(case),
        table=sw.model_table(case.model),
        batch=case.rows,
        length=case.length,
        microbatches=case.microbatches,
        engine="torch",
        dtype="bfloat16",
        stages=case.units,
        precision=None if case.precision is None else sw.load_recipe(case.precision),
        chip=machine.chip,
    )
    return price(sw.make_plan(request), machine)


def row_of(case: Published) -> str:
    """A row of the table. Raises AssertionError for a layout that is not legal, or whose memory is above the chip's."""
    plan = plan_of(case)
    pipeline, chip = plan.pipeline, plan.request.chip
    assert not plan.faults, [one.text() for one in plan.faults]
    assert pipeline is not None
    assert chip is not None
    total = pipeline.total_bytes(pipeline.fullest)
    assert total == plan.memory.total_bytes_per_device <= chip.usable_bytes
    devices, _, name = case.chips.partition(":")[2].partition("x")[0], "", case.chips.partition(":")[0]
    number = int(devices) * 8
    experts = [axis for axis, (_, role) in case.axes.items() if "moe: expert" in role]
    axes = " x ".join(f"{axis} {size}" for axis, (size, _) in case.axes.items())
    here = axes + (f", experts over {' x '.join(experts)}" if experts else "")
    cells = (
        case.model,
        f"{number:,} {name.upper()}",
        case.degrees,
        here,
        str(case.microbatches),
        f"`{pipeline.choice.text}`".replace("|", "\\|"),
        f"{pipeline.idle_share:.1%}",
        f"{total / 2**30:.1f} GiB",
        f"{chip.usable_bytes / 2**30:.1f} GiB",
    )
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    return HEAD + "".join(map(row_of, CASES))


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
