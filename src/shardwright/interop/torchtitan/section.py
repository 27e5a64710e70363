"""The options that a configuration sets for parallelism, the step and the model, under the names that the file uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.position import Position
from shardwright.interop.torchtitan.recomputation import Recomputation
from shardwright.interop.torchtitan.vocabulary import DEGREES, MICROBATCH_ROWS, MICROBATCHES, RESHARD, SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The final value of each option, and its position in the file.

    ``training``: the options of a step, with the defaults of the TorchTitan version that has these names. It is empty where
    the file sets none; a value is None where only running the program gives it. ``model``: family and flavor.
    ``other_weights``: the option that gives the model other weights than its flavor has. ``recomputation``: None where the file has only
    degrees. ``texts``: the files read, for errors.
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
