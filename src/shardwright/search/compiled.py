"""Answers of a search beside what compilers made of them: which fit, and how they rank by what their programs hold and move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from shardwright.search.solving import EQUAL

State = Literal["fits", "too large", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A step as it is planned, or as it is compiled. ``moved_bytes``, ``bytes_between``: that a device sends, and those of them between nodes or
    slices. ``link_seconds``: of sending them, one after the other. ``step_seconds``: of the step."""

    memory_bytes: int
    moved_bytes: int
    bytes_between: int
    link_seconds: float | None
    step_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAnswer:
    """``line``: why it does not fit or was not compiled; of what fits, the findings of its program that are errors. ``planned``, ``compiled``:
    None where there is no program. ``temporaries_bytes``: that the compiler allocates beside the arguments. ``buffers_bytes``: that the program's
    exchanges of tokens have room for beyond what they send."""

    state: State
    line: str
    compile_seconds: float
    planned: Held | None = None
    compiled: Held | None = None
    temporaries_bytes: int = 0
    buffers_bytes: int = 0

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> CompiledAnswer:
        """Raises ValueError, KeyError or TypeError for what ``to_json`` did not write."""
        if value["state"] not in ("fits", "too large", "failed") or set(value) != {field.name for field in fields(cls)}:
            raise ValueError
        planned, compiled = (None if value[side] is None else Held(**value[side]) for side in ("planned", "compiled"))
        if value["state"] == "fits" and (planned is None or compiled is None):
            raise ValueError
        return cls(**{**value, "planned": planned, "compiled": compiled})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileProgress:
    """Which of ``wanted`` programs is compiled, of what ``text`` names. ``left_s``: until all are, by those before; None for the first."""

    number: int
    wanted: int
    text: str
    left_s: float | None


def ranked_again(compiled: Sequence[CompiledAnswer]) -> tuple[tuple[int, int], ...]:
    """The ranks of answers that fit, each with its number in ``compiled``: by the seconds of the compiled step, of equal ones the smallest
    first. Those of which a link has no rate come last."""

    def seconds(number: int) -> float:
        held = compiled[number].compiled
        return float("inf") if held is None or held.step_seconds is None else held.step_seconds

    def size(number: int) -> int:
        held = compiled[number].compiled
        return 0 if held is None else held.memory_bytes

    ranked: list[tuple[int, int]] = []
    left = sorted(range(len(compiled)), key=lambda number: (seconds(number), size(number), number))
    while left:
        equal = [number for number in left if seconds(number) <= seconds(left[0]) * (1 + EQUAL)]
        rank = len(ranked) + 1
        ranked += [(rank, number) for number in sorted(equal, key=lambda number: (size(number), number))]
        left = left[len(equal) :]
    return tuple(ranked)
