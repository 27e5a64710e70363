"""What a configuration says of parallelism, of a step and of the model, in the words of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.findings.position import Position
from shardwright.interop.torchtitan.words import DEGREES, MICROBATCH_ROWS, MICROBATCHES, SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Each option as it is in the end, and where it stands.

    ``training``: what is said of a step, with the defaults of the version that has these words; empty where the file says
    nothing; None for what only running the program would tell. ``model``: family and flavor. ``other_weights``: the option
    that gives the model other weights than its flavor has. ``texts``: the files that were read, for errors.
    """

    source: str
    values: Mapping[str, Any]
    positions: Mapping[str, Position] = field(default_factory=dict)
    training: Mapping[str, int | None] = field(default_factory=dict)
    training_positions: Mapping[str, Position] = field(default_factory=dict)
    model: tuple[str, str] | None = None
    other_weights: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)

    def degree(self, name: str) -> int:
        return int(self.values.get(name, DEGREES[name]))

    @property
    def microbatches(self) -> int:
        """Micro-batches of a pass through the pipeline."""
        return int(self.values.get(MICROBATCHES, 1))

    @property
    def rows_of_microbatch(self) -> int:
        """What a micro-batch was before there were ``microbatches``."""
        return int(self.values.get(MICROBATCH_ROWS, 1))

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.values.get(SEQUENCE, True))
