"""What `auto` chose, where a layout or an option leaves it to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOPS = "hops"
"""What is chosen of collectives over an entire slice."""


LAYOUT = "layout"
"""What is chosen where neither layout nor mesh are said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """What ``auto`` chose. ``wire_bytes``: bytes that one device sends, for each option: of tokens for one layer of a step, of hops for an
    entire step; ``bytes_held``: that a device holds, of layouts. ``seconds`` of layouts: for the tokens of the chosen step."""

    what: str
    chosen: str
    wire_bytes: Mapping[str, int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_held: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "what": self.what,
            "chosen": self.chosen,
            "costs": dict(self.seconds),
            "wire_bytes": dict(self.wire_bytes),
            **({"bytes_per_device": dict(self.bytes_held)} if self.bytes_held else {}),
        }
