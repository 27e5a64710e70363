"""Whether a table computes the gradients of a step: every fault, each in half a sentence."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from shardwright.core.schedules.actions import COMPUTES, TOGETHER, Action, Kind, Table, ends, needs
from shardwright.core.schedules.clock import SENDS

MOST_NAMED = 4


def faults(table: Table) -> list[str]:
    """What is wrong with a table; nothing for one that computes each stage's forward pass and both halves of its backward pass
    once for each microbatch, on the stage's rank, receives what is sent and only that, and ends.

    >>> table = Table(ranks=2, virtual=1, microbatches=1, placement="loop", actions=(
    ...     (Action(0, "forward", 0), Action(0, "backward", 0)), (Action(1, "forward", 0),)))
    >>> faults(table)
    ['1B0 or 1I0 and 1W0: missing', 'rank 0 waits at 0B0 for ever']
    """
    return [
        *_computed_once(table),
        *_on_their_rank(table),
        *_sent_once(table),
        *_together(table),
        *_stuck(table),
    ]


def _computed_once(table: Table) -> Iterator[str]:
    seen = Counter(action for _, action in table.computed())
    for stage in range(table.num_stages):
        for number in range(table.microbatches):
            forward, backward, inputs, weights = (seen.pop(Action(stage, kind, number), 0) for kind in COMPUTES)
            if forward != 1:
                yield f"{Action(stage, 'forward', number)}: {_times(forward)}"
            if (backward, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                whole, first, second = (Action(stage, kind, number) for kind in COMPUTES[1:])
                if not backward + inputs + weights:
                    yield f"{whole} or {first} and {second}: missing"
                else:
                    parts = ((whole, backward), (first, inputs), (second, weights))
                    yield ", ".join(f"{action} {_times(times)}" for action, times in parts) + ": not one backward pass"
    for action in seen:
        yield f"{action}: the step has {table.num_stages} stages and {table.microbatches} microbatches"


def _times(times: int) -> str:
    return {0: "missing", 1: "once"}.get(times, f"{times} times")


def _on_their_rank(table: Table) -> Iterator[str]:
    for rank, actions in enumerate(table.actions):
        for action in actions:
            if action.kind in TOGETHER:
                continue
            if 0 <= action.stage < table.num_stages and table.rank_of(action.stage) != rank:
                yield f"{action} on rank {rank}: stage {action.stage} is on rank {table.rank_of(action.stage)}"


def _sent_once(table: Table) -> Iterator[str]:
    """Each transfer between ranks is sent once and received once; without any transfers the table has computations only."""
    apart = (*COMPUTES, *TOGETHER)
    seen = Counter(action for actions in table.actions for action in actions if action.kind not in apart)
    if not seen:
        return
    wanted: list[Action] = []
    for stage in range(table.num_stages):
        wanted.append(Action(stage, "reduce"))
        if stage + 1 < table.num_stages and table.rank_of(stage) != table.rank_of(stage + 1):
            for number in range(table.microbatches):
                wanted += [
                    Action(stage, "send", number),
                    Action(stage + 1, "receive", number),
                    Action(stage + 1, "send_gradient", number),
                    Action(stage, "receive_gradient", number),
                ]
    for action in wanted:
        times = seen.pop(action, 0)
        if times != 1:
            yield f"{action}: {_times(times)}"
    for action in seen:
        yield f"{action}: nothing is sent there"


def _together(table: Table) -> Iterator[str]:
    """Of each end that all stages share, what all ranks do for each microbatch, once, and where the end's own stage needs it."""
    has = {action.kind for actions in table.actions for action in actions}
    orders: dict[Kind, tuple[int, tuple[Kind, ...]]] = {
        "embed": (0, ("embed", "forward")),
        "logits": (table.num_stages - 1, ("forward", "logits", "input_gradient")),
        "embed_gradient": (0, ("input_gradient", "embed_gradient")),
    }
    for kind, (stage, order) in orders.items():
        for number in range(table.microbatches) if kind in has else ():
            for rank, actions in enumerate(table.actions):
                if (times := actions.count(Action(stage, kind, number))) != 1:
                    yield f"{Action(stage, kind, number)} on rank {rank}: {_times(times)}"
            own = [
                one
                for action in table.actions[table.rank_of(stage)]
                if (action.stage, action.microbatch) == (stage, number)
                for one in ends(action.kind)
                if one in order
            ]
            if tuple(own) != order:
                yield f"{Action(stage, kind, number)} on rank {table.rank_of(stage)}: not between {' and '.join(order)}"


def _stuck(table: Table) -> Iterator[str]:
    """Each rank's first action that never runs: in vain it waits for what it needs."""
    done: set[tuple[Kind, int, int | None]] = set()
    sent: dict[tuple[int, int], deque[Action]] = {}
    transfers = any(action.kind == "send" for actions in table.actions for action in actions)
    position = [0] * table.ranks
    met: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in TOGETHER and action not in met:
                    if not _all_at(table, position, action):
                        break
                    met.add(action)
                if not _ready(table, rank, action, done, sent, transfers=transfers):
                    break
                moved = True
                position[rank] += 1
                if action.kind in SENDS:
                    to = table.rank_of(action.stage + (1 if action.kind == "send" else -1))
                    sent.setdefault((rank, to), deque()).append(action)
                done.update((kind, action.stage, action.microbatch) for kind in ends(action.kind))
    for rank, (actions, begun) in enumerate(zip(table.actions, position, strict=True)):
        if begun < len(actions):
            yield f"rank {rank} waits at {actions[begun]} for ever"


def _all_at(table: Table, position: Sequence[int], action: Action) -> bool:
    return all(actions[at : at + 1] == [action] for actions, at in zip(table.actions, position, strict=True))


def _ready(
    table: Table,
    rank: int,
    action: Action,
    done: set[tuple[Kind, int, int | None]],
    sent: dict[tuple[int, int], deque[Action]],
    *,
    transfers: bool,
) -> bool:
    """Whether all that an action needs is there. A receive takes what was sent to it."""
    stage, kind, number = action
    if kind == "reduce":
        return all(("weight_gradient", stage, one) in done for one in range(table.microbatches))
    if kind in TOGETHER:
        return True
    if kind in ("receive", "receive_gradient"):
        step: Kind = "send" if kind == "receive" else "send_gradient"
        source = stage + (-1 if kind == "receive" else 1)
        queue = sent.get((table.rank_of(source), rank))
        # Between two ranks transfers arrive in the order in which they are sent.
        if not queue or queue[0] != Action(source, step, number):
            return False
        queue.popleft()
        return True
    if kind in SENDS:
        return ("forward" if kind == "send" else "input_gradient", stage, number) in done
    needed = (
        (what, of) if of == stage else _from_neighbour(table, rank, what, stage, of, transfers=transfers)
        for what, of in needs(action, table.num_stages)
    )
    return all((what, of, number) in done for what, of in needed)


def _from_neighbour(
    table: Table, rank: int, kind: Kind, stage: int, neighbour: int, *, transfers: bool
) -> tuple[Kind, int]:
    """What brings a neighbour's output to a rank: its computation, or the receive of it."""
    if not transfers or table.rank_of(neighbour) == rank:
        return kind, neighbour
    return ("receive" if kind == "forward" else "receive_gradient"), stage
