"""Sets of candidates: what a search orders and divides (``solving.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.settings import Setting

NO_LIMIT = 1 << 62

EQUAL = 0.01
"""Steps that differ by at most this share are equally fast: the clock is no finer. Of equal ones the smallest is the answer."""

Level = Literal["kept", "held", "links", "stages", "microbatches", "schedule", "choice", "unfit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """``bytes_per_device``: of a choice, whose step fits; of what is ``unfit``, the least that any candidate of the arrangement needs; of any other,
    what one of its candidates needs, or needs at least."""

    arrangement: Arrangement
    setting: Setting
    level: Level
    seconds: float
    bytes_per_device: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """Orders nodes: the faster first, then the smaller; of equal ones always the same first."""
        return (self.seconds, self.level != "choice", self.bytes_per_device, self.text)

    @property
    def text(self) -> str:
        return f"{self.level} of {self.arrangement.key} {self.setting.text}".rstrip()

    @property
    def ranks(self) -> int:
        """Of a pipeline; 1 without stages."""
        return self.arrangement.sizes.get("stage", 1)
