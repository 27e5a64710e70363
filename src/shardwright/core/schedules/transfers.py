"""The transfers and reductions of a table: what each rank sends and receives between its computations, and when it reduces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.schedules.actions import Action, Kind, Table, ends, needs

OF: dict[Kind, tuple[Kind, Kind, int]] = {
    "forward": ("send", "receive", 1),
    "input_gradient": ("send_gradient", "receive_gradient", -1),
    "backward": ("send_gradient", "receive_gradient", -1),
}
"""What follows a computation: its send, the receive of it, and the stage that receives, counted from this one."""


def with_transfers(table: Table, *, embedding: bool = False, logits: bool = False) -> Table:
    """The table with sends, receives and reductions; and, of ends that all stages share, with what all ranks do together.

    A rank sends as soon as it has computed. The other's receive is put where that rank is at that time, so that between any two ranks
    receives have the order of the sends, whatever the schedule. A stage's gradients are reduced once, after its last microbatch. What
    ranks do together is put where each of them is when a stage needs it: so all have it in one order, and none waits for ever.

    Raises AssertionError for a table whose computations wait for each other (``proof.py`` names them).
    """
    found: list[list[Action]] = [[] for _ in range(table.ranks)]
    left = dict.fromkeys(range(table.num_stages), table.microbatches)
    first, last = 0, table.num_stages - 1

    def together(stage: int, kind: Kind, microbatch: int | None) -> None:
        for actions in found:
            actions.append(Action(stage, kind, microbatch))

    for rank, action in _in_time(table):
        if embedding and (action.stage, action.kind) == (first, "forward"):
            together(first, "embed", action.microbatch)
        found[rank].append(action)
        if logits and (action.stage, action.kind) == (last, "forward"):
            together(last, "logits", action.microbatch)
        if embedding and action.stage == first and action.kind in ("backward", "input_gradient"):
            together(first, "embed_gradient", action.microbatch)
        if action.kind in OF:
            send, receive, step = OF[action.kind]
            to = action.stage + step
            if 0 <= to < table.num_stages and table.rank_of(to) != rank:
                found[rank].append(Action(action.stage, send, action.microbatch))
                found[table.rank_of(to)].append(Action(to, receive, action.microbatch))
        if action.kind in ("backward", "weight_gradient"):
            left[action.stage] -= 1
            if not left[action.stage]:
                found[rank].append(Action(action.stage, "reduce"))
    return replace(table, actions=found)


def _in_time(table: Table) -> Iterator[tuple[int, Action]]:
    """The computations in slots of time: in each slot a rank makes its next one, if what that needs was made before."""
    made: set[tuple[Kind, int, int | None]] = set()
    position = [0] * table.ranks
    while any(at < len(table.actions[rank]) for rank, at in enumerate(position)):
        slot = [
            (rank, table.actions[rank][at])
            for rank, at in enumerate(position)
            if at < len(table.actions[rank]) and _possible(table, table.actions[rank][at], made)
        ]
        assert slot, "the computations wait for each other"
        for rank, action in slot:
            yield rank, action
            position[rank] += 1
            made.update((kind, action.stage, action.microbatch) for kind in ends(action.kind))


def _possible(table: Table, action: Action, made: set[tuple[Kind, int, int | None]]) -> bool:
    return all((kind, stage, action.microbatch) in made for kind, stage in needs(action, table.num_stages))
