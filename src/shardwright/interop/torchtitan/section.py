"""The options that a configuration sets for parallelism, the step and the model, under the names that the file uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.position import Position
from shardwright.interop.torchtitan.recomputation import BUDGET, FIELD, FORCED, MODE, OPTION, Recomputation
from shardwright.interop.torchtitan.vocabulary import (
    COMPUTED_IN,
    DEGREES,
    EARLIER_SECTIONS,
    EARLIER_TRAINING,
    FIRST_LESS,
    FIRST_ROWS,
    LAST_LESS,
    LAYERS_PER_STAGE,
    MICROBATCH_ROWS,
    MICROBATCHES,
    MODULES,
    REMOVED,
    RESHARD,
    SCHEDULE,
    SECTION,
    SEQUENCE,
    STORED_IN,
    TIMETABLES,
    TRAINING,
)

_DEGREES = (*DEGREES, *REMOVED, SEQUENCE)
_STAGES = (MICROBATCHES, MICROBATCH_ROWS, SCHEDULE, LAYERS_PER_STAGE, FIRST_LESS, LAST_LESS, MODULES, *TIMETABLES)
CARRIED_OVER: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(EARLIER_SECTIONS, _DEGREES),
    SECTION: (*_DEGREES, RESHARD, *_STAGES),
    "training": (*_DEGREES, *TRAINING, *EARLIER_TRAINING, FIRST_ROWS, STORED_IN, COMPUTED_IN),
    FIELD: (MODE, OPTION, BUDGET, *FORCED),
    "model": ("name", "flavor"),
}
OF_NO_MODEL = {
    **CARRIED_OVER,
    "training": tuple(name for name in CARRIED_OVER["training"] if name not in (STORED_IN, COMPUTED_IN)),
    FIELD: (),
}
"""The options that a layout, a plan or a refusal follows from, by section. All others that a file sets are listed as not read;
without a model to plan, also its dtypes and what it keeps for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The final value of each option, and its position in the file.

    ``training``: the options of a step, with the defaults of the TorchTitan version that has these names. It is empty where
    the file sets none; a value is None where only running the program gives it. ``model``: family and flavor.
    ``other_weights``: the option that gives the model other weights than its flavor has. ``recomputation``: None where the file has only
    degrees. ``texts``: the files read, for errors. ``stated``: every option that the
    file sets, in its sections, whether it is read or not; of a value that only running the program gives, None.
    """

    source: str
    values: Mapping[str, Any]
    positions: Mapping[str, Position] = field(default_factory=dict)
    training: Mapping[str, int | None] = field(default_factory=dict)
    training_positions: Mapping[str, Position] = field(default_factory=dict)
    model: tuple[str, str] | None = None
    other_weights: str = ""
    recomputation: Recomputation | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)

    def not_read(self, *, planned: bool) -> tuple[str, ...]:
        """The options that the file sets and from which nothing here follows, as ``compile.enable``. ``planned``: a model is planned."""
        return tuple(_not_carried_over(self.stated, "", CARRIED_OVER if planned else OF_NO_MODEL))

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The dtypes that the file sets, by option."""
        training = self.stated.get("training")
        options = training if isinstance(training, Mapping) else {}
        return {name: options[name] for name in (STORED_IN, COMPUTED_IN) if options.get(name) is not None}

    def degree(self, name: str) -> int:
        return int(self.values.get(name, DEGREES[name]))

    @property
    def microbatches(self) -> int:
        """Microbatches of a pass through the pipeline."""
        return int(self.values.get(MICROBATCHES, 1))

    @property
    def rows_of_microbatch(self) -> int:
        """Rows of a microbatch, which earlier versions set in place of ``microbatches``."""
        return int(self.values.get(MICROBATCH_ROWS, 1))

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.values.get(SEQUENCE, True))

    @property
    def keep_gathered(self) -> bool:
        """Whether weights stay gathered from the forward to the backward pass, without a pipeline."""
        return self.values.get(RESHARD) == "never" and self.degree("pipeline_parallel_degree") == 1


def _not_carried_over(
    tables: Mapping[str, Any], section: str, carried_over: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    for name, value in tables.items():
        path = f"{section}.{name}" if section else name
        if isinstance(value, Mapping):
            yield from _not_carried_over(value, path, carried_over)
        elif name not in carried_over.get(section, ()):
            of_words = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
            yield f"{path} {' '.join(value)}" if name == "converters" and of_words else path
