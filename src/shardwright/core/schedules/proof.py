"""Whether a table computes the gradients of a step: every fault, each in half a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwright.core.schedules.actions import COMPUTES, TOGETHER, Action, Kind, Table, ends
from shardwright.core.schedules.clock import run

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
    for rank, action in run(table).stuck.items():
        yield f"rank {rank} waits at {action} for ever"
