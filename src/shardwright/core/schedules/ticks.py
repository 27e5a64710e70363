"""The table ``circular`` as ticks of one program that all ranks run: what each computes in each tick, and where it keeps its inputs.

Each tick has a forward pass, a backward pass, and then two permutes along the ranks: outputs go to the next rank, and gradients of
inputs to the one before, the last and the first being neighbours. What a rank receives so is what it computes with in the next tick,
and so nothing but the inputs of its live microbatches is kept. In the last stage the two passes of a microbatch are in one tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.core.schedules.actions import Action, Table


class Turn(NamedTuple):
    """What a rank computes in a tick: its chunk, the microbatch, and the slot that keeps the inputs from the forward pass to the
    backward pass. ``active`` False: nothing; the numbers are 0."""

    active: bool
    chunk: int
    microbatch: int
    slot: int


NOTHING = Turn(active=False, chunk=0, microbatch=0, slot=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """``forward``, ``backward``: a turn for each rank and tick. ``slots``: the most live microbatches of any rank."""

    forward: Sequence[Sequence[Turn]]
    backward: Sequence[Sequence[Turn]]
    slots: int

    def __len__(self) -> int:
        return len(self.forward[0])


def ticks_of(table: Table) -> Ticks:
    """The ticks of a table ``circular``.

    >>> from shardwright.core.schedules.schedules import table_of
    >>> ticks = ticks_of(table_of("circular", ranks=2, virtual=1, microbatches=3))
    >>> ["".join(str(turn.microbatch) if turn.active else "." for turn in rank) for rank in (*ticks.forward, *ticks.backward)]
    ['012..', '.012.', '..012', '.012.']
    >>> ticks.slots
    3
    """
    number = ticks_in(table.ranks, table.virtual, table.microbatches)
    behind = number - table.microbatches * table.virtual
    forward, backward, slots = [], [], 0
    for rank, actions in enumerate(table.actions):
        passes = {kind: [one for one in actions if one.kind == kind] for kind in ("forward", "backward")}
        timed = sorted(
            [
                *((rank + place, one) for place, one in enumerate(passes["forward"])),
                *((behind - rank + place, one) for place, one in enumerate(passes["backward"])),
            ],
            # In a tick the forward pass is first.
            key=lambda at: (at[0], at[1].kind == "backward"),
        )
        turns, most = _with_slots(timed, table.ranks)
        forward.append(_filled(turns, "forward", number))
        backward.append(_filled(turns, "backward", number))
        slots = max(slots, most)
    return Ticks(forward=forward, backward=backward, slots=slots)


def ticks_in(ranks: int, virtual: int, microbatches: int) -> int:
    """The ticks of a step: those of a rank's forward passes, and those by which the first rank's backward passes are later.

    >>> ticks_in(2, 1, 3), ticks_in(4, 2, 8)
    (5, 26)
    """
    return microbatches * virtual + (virtual - 1) * ranks + 2 * (ranks - 1)


def _with_slots(timed: Sequence[tuple[int, Action]], ranks: int) -> tuple[dict[tuple[int, str], Turn], int]:
    """The turns by tick and kind, each with the lowest slot that is free at that time; and how many slots they take."""
    taken: dict[tuple[int, int], int] = {}
    turns: dict[tuple[int, str], Turn] = {}
    for tick, (stage, kind, microbatch) in timed:
        assert microbatch is not None
        if kind == "forward":
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken.values())
            taken[stage, microbatch] = slot
        else:
            slot = taken.pop((stage, microbatch))
        turns[tick, kind] = Turn(active=True, chunk=stage // ranks, microbatch=microbatch, slot=slot)
    return turns, 1 + max(turn.slot for turn in turns.values())


def _filled(turns: dict[tuple[int, str], Turn], kind: str, number: int) -> list[Turn]:
    return [turns.get((tick, kind), NOTHING) for tick in range(number)]
