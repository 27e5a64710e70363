"""How the layers of a model become stages: what the user asked for and what follows, with every reason why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.wording import count, either, every
from shardwright.core.schedules.actions import Table
from shardwright.core.schedules.clock import run
from shardwright.core.schedules.schedules import SCHEDULES, table_of
from shardwright.core.schedules.transfers import with_transfers
from shardwright.core.stages.assignment import Stage, assigned, balanced
from shardwright.core.stages.notation import read_stages, stages_text
from shardwright.core.stages.units import EMBEDDING, LOGITS, Unit, UnitCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why there are no stages. ``microbatches``, ``virtual``, ``ranks``: numbers that would do, the nearest first.
    ``other_ends``: other roles in embedding or logits would; ``one_entry``: the options on one axis alone."""

    found: str
    needed: str
    microbatches: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    without_stages: bool = False
    other_ends: bool = False
    one_entry: bool = False


SharedBy = Literal["flops", "seconds", "seconds, within the memory", "given"]
"""By what units are shared out; ``within the memory``: the assignment that is the fastest by seconds alone does not fit."""


PARTS_OF_A_SECOND = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``ranks``: the devices along the stage axes. ``virtual``: stages of each. ``stages``: none where there are faults. ``by``: by what the
    units were shared out."""

    ranks: int
    virtual: int
    schedule: str
    microbatches: int
    units: Sequence[Unit]
    stages: tuple[Stage, ...] = ()
    faults: tuple[Fault, ...] = ()
    by: SharedBy = "flops"

    @property
    def num_stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def text(self) -> str:
        """The stages in Megatron's notation."""
        return stages_text([stage.letters for stage in self.stages])

    @property
    def computations(self) -> Table:
        """The computations of every rank."""
        return computations(self.schedule, self.ranks, self.virtual, self.microbatches)

    @property
    def table(self) -> Table:
        """Every action of every rank, with transfers. It takes several times as long to make."""
        return timetable(self.schedule, self.ranks, self.virtual, self.microbatches)


@lru_cache(maxsize=64)
def computations(schedule: str, ranks: int, virtual: int, microbatches: int) -> Table:
    """The table of a schedule that runs with these numbers, without transfers."""
    return table_of(schedule, ranks, virtual, microbatches)


@lru_cache(maxsize=64)
def timetable(schedule: str, ranks: int, virtual: int, microbatches: int, shared: str = "") -> Table:
    """The table of a schedule that runs with these numbers, with transfers. ``shared``: the ends that all stages share, as letters."""
    table = computations(schedule, ranks, virtual, microbatches)
    return with_transfers(table, embedding=EMBEDDING in shared, logits=LOGITS in shared)


def own_schedule(engine: Engine, ranks: int, virtual: int, microbatches: int) -> str:
    """The schedule of an engine where none is named.

    >>> own_schedule("jax", 4, 1, 8), own_schedule("torch", 4, 1, 8), own_schedule("torch", 4, 1, 2), own_schedule("torch", 4, 2, 8)
    ('circular', '1f1b', 'gpipe', 'interleaved')
    """
    schedules = ENGINES[engine].schedules
    wanted = "interleaved" if virtual > 1 else "1f1b" if microbatches >= ranks else "gpipe"
    return wanted if wanted in schedules else schedules[0]


def choose(
    units: Sequence[Unit],
    *,
    ranks: int,
    microbatches: int,
    engine: Engine,
    virtual: int | None = None,
    schedule: str | None = None,
    text: str | None = None,
    costs: Sequence[UnitCost] | None = None,
    limit_bytes: int | None = None,
) -> Choice:
    """The stages of a pipeline of so many ranks. ``virtual``, ``schedule`` and ``text`` are what the user gave. ``costs``: of each unit, by
    which they are shared out; ``limit_bytes``: the memory of a device, if a rank has one stage and holds no more than that stage."""
    choice = without_stages(
        units, ranks=ranks, microbatches=microbatches, engine=engine, virtual=virtual, schedule=schedule, text=text
    )
    return shared_out(choice, text, costs, limit_bytes)


def without_stages(
    units: Sequence[Unit],
    *,
    ranks: int,
    microbatches: int,
    engine: Engine,
    virtual: int | None = None,
    schedule: str | None = None,
    text: str | None = None,
) -> Choice:
    """The same before the units are shared out, with every reason why they cannot be."""
    letters = None if text is None else read_stages(text)
    if letters is not None and len(letters) % ranks == 0:
        virtual = len(letters) // ranks
    elif virtual is None:
        virtual = 1 if schedule is None else SCHEDULES[schedule].virtual or 1
    schedule = schedule or own_schedule(engine, ranks, virtual, microbatches)
    choice = Choice(ranks=ranks, virtual=virtual, schedule=schedule, microbatches=microbatches, units=units)
    faults = (
        *_of_schedule(choice),
        *(_of_number(choice) if letters is None else _of_text(choice, letters)),
    )
    return replace(choice, faults=faults) if faults else choice


def shared_out(
    choice: Choice,
    text: str | None = None,
    costs: Sequence[UnitCost] | None = None,
    limit_bytes: int | None = None,
) -> Choice:
    """A choice without stages, with them; as it is where it has faults."""
    if choice.faults:
        return choice
    if text is not None:
        return replace(choice, stages=assigned(choice.units, [*map(len, read_stages(text))]), by="given")
    counts, by = _counts(choice, costs, limit_bytes)
    return replace(choice, stages=assigned(choice.units, counts), by=by)


def _counts(
    choice: Choice, costs: Sequence[UnitCost] | None, limit_bytes: int | None
) -> tuple[tuple[int, ...], SharedBy]:
    """The number of units of each stage. Memory limits them where a rank has one stage: then a stage's bytes are the rank's."""
    if costs is None or len(costs) != len(choice.units):
        counts, by = balanced([round(unit.step) for unit in choice.units], choice.num_stages), "flops"
        assert counts is not None
        return counts, by
    # Whole numbers, so that equal sums are equal in any order.
    seconds = [round(cost.seconds * PARTS_OF_A_SECOND) for cost in costs]
    fastest = balanced(seconds, choice.num_stages)
    assert fastest is not None
    if limit_bytes is None or choice.virtual > 1:
        return fastest, "seconds"
    live = run(choice.computations).most_live

    def fits(stage: int, first: int, end: int) -> bool:
        own = costs[first:end]
        held = sum(cost.stored_bytes + live[stage] * cost.saved_bytes for cost in own)
        return held + max(cost.working_bytes for cost in own) <= limit_bytes

    ends = [*accumulate(fastest)]
    if all(fits(stage, end - number, end) for stage, (number, end) in enumerate(zip(fastest, ends, strict=True))):
        return fastest, "seconds"
    # Where none fits, SW312 says so of the fastest.
    fitting = balanced(seconds, choice.num_stages, fits) or fastest
    return fitting, "seconds" if fitting == fastest else "seconds, within the memory"


def _of_schedule(choice: Choice) -> Iterator[Fault]:
    rules, ranks, virtual, number = SCHEDULES[choice.schedule], choice.ranks, choice.virtual, choice.microbatches
    if rules.virtual not in (None, virtual):
        yield Fault(
            found=f"schedule '{rules.name}' with {_stages_each(virtual)}",
            needed=f"{_stages_each(rules.virtual or 1)}",
            virtual=(rules.virtual or 1,),
        )
        return
    least, multiple = rules.least_microbatches(ranks, virtual), rules.multiple(ranks, virtual, number)
    if number < least:
        yield Fault(
            found=f"{count(number, 'microbatch')} for schedule '{rules.name}' with {ranks * virtual} stages on {ranks} ranks",
            needed=f"at least {count(least, 'microbatch')}",
            microbatches=(least, 2 * least),
        )
    elif number % multiple:
        below, above = number - number % multiple, number + multiple - number % multiple
        yield Fault(
            found=f"{count(number, 'microbatch')} for schedule '{rules.name}' on {ranks} ranks",
            needed=f"a multiple of {multiple}: {either(one for one in (below, above) if one)} microbatches",
            microbatches=tuple(one for one in (above, below) if one),
        )


def _of_number(choice: Choice) -> Iterator[Fault]:
    if choice.num_stages > len(choice.units):
        most = len(choice.units)
        yield Fault(
            found=f"{choice.num_stages} stages, {_stages_each(choice.virtual)}, for {most} units: {_counted(choice.units)}",
            needed=f"at most {most} stages, so that each has a unit",
            ranks=tuple(
                ranks
                for ranks in range(choice.ranks - 1, 0, -1)
                if ranks * choice.virtual <= most and choice.ranks % ranks == 0
            ),
            virtual=tuple(one for one in (most // choice.ranks,) if one and SCHEDULES[choice.schedule].virtual is None),
        )


def _of_text(choice: Choice, stages: Sequence[str]) -> Iterator[Fault]:
    wanted = "".join(unit.letter for unit in choice.units)
    if len(stages) % choice.ranks:
        yield Fault(
            found=f"{len(stages)} stages in --stages on {choice.ranks} ranks",
            needed=f"a multiple of {choice.ranks}, so that all ranks have as many",
            without_stages=True,
        )
    empty = [number for number, letters in enumerate(stages) if not letters]
    if empty:
        yield Fault(
            found=f"stage {empty[0]} of --stages has no unit",
            needed="at least one unit in each stage: E, a layer t, or L",
            without_stages=True,
        )
    elif "".join(stages) != wanted:
        yield Fault(
            found=f"--stages has {_letters(''.join(stages))}",
            needed=f"the model's units in their order: {_letters(wanted)}",
            without_stages=True,
        )


def _stages_each(virtual: int) -> str:
    return f"{count(virtual, 'stage')} a rank"


def _counted(units: Sequence[Unit]) -> str:
    return _letters("".join(unit.letter for unit in units))


def _letters(letters: str) -> str:
    """
    >>> _letters("Ettt"), _letters("EttL"), _letters("tEt")
    ('the embedding and 3 layers', 'the embedding, 2 layers and the logits', '1 layer, the embedding and 1 layer')
    """
    names = {"E": "the embedding", "L": "the logits"}
    parts = [
        part
        for letter, run in groupby(letters)
        for run_of in ([*run],)
        for part in ([count(len(run_of), "layer")] if letter == "t" else [names[letter]] * len(run_of))
    ]
    return every(parts) if parts else "no unit"
