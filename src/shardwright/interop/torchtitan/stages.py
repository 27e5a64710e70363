"""The stages of a pipeline in a configuration: its schedule, how many stages a rank has, and the units of each.

| option | here |
|---|---|
| pipeline_parallel_schedule | `schedule` of the stage axis; 1F1B where the file has none |
| pipeline_parallel_layers_per_stage | `virtual`: so many stages that each has at most that many layers, ends counted; without it one a rank, or two of a schedule for several |
| pipeline_parallel_first_stage_less_layers, pipeline_parallel_last_stage_less_layers | how many layers the embedding and the head count as |
| module_fqns_per_model_part | the units of each stage, in place of the above |
| pipeline_parallel_schedule_csv, pipeline_parallel_split_points | refused by name |

Layers are shared out evenly with the ends counted; the first stages have one more where they do not divide (``distributed/pipeline_parallel.py``
of pytorch/torchtitan 02ef790c7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from shardwright.core.findings.bounds import is_integer
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.faults import shown
from shardwright.core.layout.wording import count, either
from shardwright.core.model.table import ModelTable
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.core.stages.notation import stages_text
from shardwright.interop.torchtitan.degrees import Degrees
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.vocabulary import (
    FIRST_LESS,
    LAST_LESS,
    LAYERS_PER_STAGE,
    MODULES,
    SCHEDULE,
    TIMETABLES,
)

NAMES: Mapping[str, str] = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "zero-bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
"""Our name of each of PyTorch's schedules, which it finds by names in any case."""

SEVERAL = 2
"""Stages of a rank under a schedule for several, where no option says how many layers a stage has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """``units``: of each stage, in the notation of ``--stages``; None where no model is known."""

    schedule: str
    virtual: int
    units: str | None


class _RefusedError(Exception):
    """Why there are no stages."""

    def __init__(self, name: str, found: str, needed: str, fix: str = "") -> None:
        super().__init__(found)
        self.name, self.found, self.needed, self.fix = name, found, needed, fix


def stages_of(section: Section, degrees: Degrees, table: ModelTable | None) -> PipelineOptions | Finding | None:
    """The stages; None without a pipeline; a finding where TorchTitan ends with an error, and for what cannot be said here."""
    if degrees.sizes["pp"] == 1:
        return None
    try:
        return _stages(section, degrees.sizes["pp"], None if table is None else table.num_layers)
    except _RefusedError as why:
        return Finding(
            code="SW123" if why.name in TIMETABLES else "SW110",
            severity=ERROR,
            where=f"'{why.name}'",
            position=section.positions.get(why.name, section.positions.get("pipeline_parallel_degree")),
            found=why.found,
            needed=why.needed,
            fix=why.fix,
        )


ERROR: Severity = "error"


def _stages(section: Section, ranks: int, layers: int | None) -> PipelineOptions:
    for name in TIMETABLES:
        if section.values.get(name):
            raise _RefusedError(
                name,
                f"{shown(section.values[name])}: a timetable or a split of the user's own",
                f"'{SCHEDULE}' and '{MODULES}'",
                f"Take '{name}' out.",
            )
    schedule = _schedule(section)
    several = SCHEDULES[schedule].virtual != 1
    parts = section.values.get(MODULES)
    if parts is not None:
        found = tuple(_letters(parts))
        if len(found) % ranks:
            raise _RefusedError(MODULES, f"{count(len(found), 'stage')} on {ranks} ranks", f"a multiple of {ranks}")
        return PipelineOptions(schedule=schedule, virtual=len(found) // ranks, units=stages_text(found))
    first, last = _number(section, FIRST_LESS, 1, least=0), _number(section, LAST_LESS, 1, least=0)
    each = None if section.values.get(LAYERS_PER_STAGE) is None else _number(section, LAYERS_PER_STAGE, 1, least=1)
    number = ranks * (SEVERAL if several else 1)
    if each is not None:
        if layers is None:
            # Without a model the number of stages is not known.
            return PipelineOptions(schedule=schedule, virtual=SEVERAL if several else 1, units=None)
        number = ceil((layers + first + last) / each)
        if number % ranks or (number == ranks) is several:
            kind = (
                f"several stages a rank, which '{schedule}' needs"
                if several
                else f"one stage a rank, as '{schedule}' has"
            )
            right = [
                one for one in range(1, layers + first + last + 1) if _fits(layers + first + last, one, ranks, several)
            ]
            raise _RefusedError(
                LAYERS_PER_STAGE,
                f"{each}, which makes {count(number, 'stage')} of {layers} layers and their ends on {ranks} ranks",
                f"{kind}: {either(right)}" if right else kind,
                f"Write '{LAYERS_PER_STAGE} = {min(right, key=lambda one: abs(one - each))}'." if right else "",
            )
    units = None if layers is None else stages_text(tuple(_shared_out(number, layers, first, last)))
    return PipelineOptions(schedule=schedule, virtual=number // ranks, units=units)


def _fits(units: int, each: int, ranks: int, several: bool) -> bool:
    number = ceil(units / each)
    return number % ranks == 0 and (number > ranks) is several


def _schedule(section: Section) -> str:
    given = section.values.get(SCHEDULE, "1F1B")
    by_lower = {name.lower(): ours for name, ours in NAMES.items()}
    if not isinstance(given, str) or given.lower() not in by_lower:
        raise _RefusedError(SCHEDULE, shown(given), f"one of {', '.join(NAMES)}")
    return by_lower[given.lower()]


def _number(section: Section, name: str, default: int, *, least: int) -> int:
    value: Any = section.values.get(name, default)
    if not is_integer(value) or value < least:
        raise _RefusedError(name, shown(value), f"a whole number of at least {least}")
    return value


def _shared_out(number: int, layers: int, first: int, last: int) -> Iterator[str]:
    """The letters of each stage: all layers with the ends counted, evenly, one more for the first ones.

    >>> list(_shared_out(4, 6, 1, 1)), list(_shared_out(3, 7, 2, 1))
    (['Et', 'tt', 'tt', 'tL'], ['Ett', 'ttt', 'ttL'])
    """
    least, more = divmod(layers + first + last, number)
    for name, less in ((FIRST_LESS, first), (LAST_LESS, last)):
        if less > least:
            raise _RefusedError(name, f"{less}, and a stage has {least} of {layers + first + last}", f"at most {least}")
    for stage in range(number):
        own = least + (stage < more)
        ends = ("E" if stage == 0 else "", "L" if stage == number - 1 else "")
        yield ends[0] + "t" * (own - (first if ends[0] else 0) - (last if ends[1] else 0)) + ends[1]


def _letters(parts: Any) -> Iterator[str]:
    """The letters of the modules of each stage: the norm and the output are the logits."""
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in parts):
        raise _RefusedError(MODULES, shown(parts), "a list of the modules of each stage")
    layers = [name for part in parts for name in part if isinstance(name, str) and name.startswith("layers.")]
    for number, name in enumerate(layers):
        if name != f"layers.{number}":
            raise _RefusedError(MODULES, f"'{name}' where 'layers.{number}' is next", "each layer once, in their order")
    for number, part in enumerate(parts):
        if not part:
            raise _RefusedError(MODULES, f"no module in stage {number}", "at least one module in each stage")
        letters = "".join(_letter(name) for name in part)
        if letters.endswith("nL"):
            letters = f"{letters[:-2]}L"
        if "n" in letters or letters.count("L") > 1:
            raise _RefusedError(MODULES, f"{shown(list(part))}", "'norm' and 'output' last, in one stage")
        yield letters


def _letter(name: Any) -> str:
    known = {"tok_embeddings": "E", "norm": "n", "output": "L", "lm_head": "L"}
    if isinstance(name, str) and name.startswith("layers.") and name[7:].isdigit():
        return "t"
    if name not in known:
        raise _RefusedError(MODULES, f"module {shown(name)}", "tok_embeddings, layers.N, norm and output")
    return known[name]
