"""Which process writes which box: every box that is held once, whoever holds it; and replicas are compared, never assumed equal.

Each process says which boxes it holds. A box that several hold is hashed by each of them, and written by one, a different
one for each tensor in turn. No process plans for the others: each draws the same conclusion from the same answers, which are a
few bytes per tensor and exchanged for some hundred tensors at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.checkpoint import CheckpointError, OwnedBox
from shardwright.runs.own_program.held import HeldShard, HeldTensor, digest, read
from shardwright.runs.own_program.members import Members

AT_A_TIME = 512
"""Tensors of one exchange: of 4,096 processes, some tens of megabytes."""
SHOWN = 20

Replicas = Mapping[str, tuple[HeldShard, ...]]
"""The shards of one tensor here by the key of their box."""


def boxes_to_write(held: Mapping[str, HeldTensor], names: Sequence[str], members: Members) -> list[OwnedBox]:
    """The boxes that this process writes. ``names``: of all tensors, the same in all processes.

    Raises CheckpointError (SW502) in all processes where replicas of a box differ, with the tensors and the processes.
    """
    own: list[OwnedBox] = []
    different: list[Different] = []
    first = 0
    for some in _batches(names):
        here = [dict(held[name].replicas()) if name in held else {} for name in some]
        keys = members.all_do("the boxes of each", lambda here=here: [list(one) for one in here])
        holders = [_holders([process[number] for process in keys]) for number in range(len(some))]
        digests = members.all_do(
            "the digests of replicas",
            lambda some=some, here=here, holders=holders: [
                _digests(name, one, by_key) for name, one, by_key in zip(some, here, holders, strict=True)
            ],
        )
        for number, (name, replicas) in enumerate(zip(some, here, strict=True)):
            different += _different(name, [process[number] for process in digests])
            for key, shards in replicas.items():
                processes = holders[number][key]
                if processes[(first + number) % len(processes)] == members.index:
                    own.append(_owned(name, shards[0]))
        first += len(some)
    if different:
        raise refusal(different, members)
    return own


Different = tuple[str, str, Sequence[Sequence[int]]]
"""A tensor, a box of it, and the groups of processes that hold equal values."""

ADVICE = (
    "If they should be equal, they have diverged: make them equal first. If each is a shard of its own (of tensor or expert "
    "parallelism), say so in its placements, or give each a name of its own."
)


def refusal(different: Sequence[Different], members: Members) -> CheckpointError:
    """The error (SW502) of replicas that differ, by tensor and processes."""
    lines = [f"  '{name}', box [{key}]: {_against(parties, members)}" for name, key, parties in different]
    return CheckpointError(
        "equal names with other values, of which a checkpoint would keep one; nothing was saved:",
        lines=[*lines[:SHOWN], *([f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []), ADVICE],
        code="SW502",
    )


def _batches(names: Sequence[str]) -> Sequence[Sequence[str]]:
    return [names[start : start + AT_A_TIME] for start in range(0, len(names), AT_A_TIME)]


def _holders(keys: Sequence[Sequence[str]]) -> Mapping[str, list[int]]:
    """The processes that hold each box, ascending."""
    found: dict[str, list[int]] = {}
    for process, one in enumerate(keys):
        for key in one:
            found.setdefault(key, []).append(process)
    return found


def _digests(name: str, here: Replicas, holders: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """The different digests of each box that is held more than once, here or elsewhere."""
    return {
        key: sorted({digest(read(name, shard)) for shard in shards})
        for key, shards in here.items()
        if len(holders[key]) > 1 or len(shards) > 1
    }


def _different(name: str, digests: Sequence[Mapping[str, Sequence[str]]]) -> list[Different]:
    by_key: dict[str, dict[str, list[int]]] = {}
    for process, one in enumerate(digests):
        for key, values in one.items():
            for value in values:
                by_key.setdefault(key, {}).setdefault(value, []).append(process)
    return [(name, key, sorted(groups.values())) for key, groups in by_key.items() if len(groups) > 1]


def _against(parties: Sequence[Sequence[int]], members: Members) -> str:
    if len({tuple(one) for one in parties}) == 1:
        return f"devices of {members.named(parties[0])} hold other values than each other"
    shown = " and ".join(members.named(one) for one in parties[:3])
    return f"{shown}{f' and {len(parties) - 3} more groups' if len(parties) > 3 else ''} hold other values"


def _owned(name: str, shard: HeldShard) -> OwnedBox:
    return OwnedBox(name=name, box=shard.box, array=lambda: read(name, shard))
