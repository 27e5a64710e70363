"""Which process writes which box: every box that is held once, whoever holds it; and replicas are compared, never assumed equal.

Each process says which boxes it holds. A box that several hold is hashed by each of them, and written by one, a different
one for each tensor in turn. No process plans for the others: each draws the same conclusion from the same answers, which are
eight bytes for each box, twice that for a replica, and exchanged for some tensors at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from shardwright.checkpoint import CheckpointError, OwnedBox
from shardwright.runs.own_program.held import HeldShard, HeldTensor, digest, owned, read
from shardwright.runs.own_program.members import Members

AT_A_TIME = 1024
"""Tensors of one exchange: of 4,096 processes, some tens of megabytes."""
SHOWN = 20

Different = tuple[str, str, Sequence[Sequence[int]]]
"""A tensor, a box of it, and the groups of processes that hold equal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """A box that this process holds, once or on several devices. ``turn``: the number of its tensor. ``code``: of tensor and box."""

    turn: int
    name: str
    key: str
    shards: tuple[HeldShard, ...]

    @property
    def code(self) -> int:
        return xxhash.xxh3_64_intdigest(f"{self.name}\n{self.key}".encode())


def boxes_to_write(held: Mapping[str, HeldTensor], names: Sequence[str], members: Members) -> list[OwnedBox]:
    """The boxes that this process writes. ``names``: of all tensors, the same in all processes.

    Raises CheckpointError (SW502) in all processes where replicas of a box differ, with the tensors and the processes.
    """
    own: list[OwnedBox] = []
    different: list[tuple[int, Different]] = []
    for first in range(0, len(names), AT_A_TIME):
        mine = [
            Mine(turn=turn, name=name, key=key, shards=shards)
            for turn, name in enumerate(names[first : first + AT_A_TIME], first)
            if name in held
            for key, shards in held[name].replicas()
        ]
        codes = [one.code for one in mine]
        answers = members.all_do("the boxes of each", lambda codes=codes: _sent(codes))
        holders = _by_code(codes, answers, 1)
        compared = [one for one, code in zip(mine, codes, strict=True) if len(holders[code]) > 1 or len(one.shards) > 1]
        numbers = members.all_do("the digests of replicas", lambda compared=compared: _sent(_digests(compared)))
        found = _by_code([one.code for one in compared], numbers, 2)
        for one in compared:
            groups: dict[int, list[int]] = {}
            for process, value in found[one.code]:
                groups.setdefault(value, []).append(process)
            if len(groups) > 1:
                different.append((one.turn, (one.name, one.key, sorted(groups.values()))))
        for one, code in zip(mine, codes, strict=True):
            writers = holders[code]
            if writers[one.turn % len(writers)][0] == members.index:
                own.append(owned(one.name, one.shards[0]))
    _refuse(different, members)
    return own


def refusal(different: Sequence[Different], members: Members) -> CheckpointError:
    """The error (SW502) of replicas that differ, by tensor and processes."""
    lines = [f"  '{name}', box [{key}]: {_against(parties, members)}" for name, key, parties in different]
    return CheckpointError(
        "equal names with other values, of which a checkpoint would keep one; nothing was saved:",
        lines=[*lines[:SHOWN], *([f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []), ADVICE],
        code="SW502",
    )


ADVICE = (
    "If they should be equal, they have diverged: make them equal first. If each is a shard of its own (of tensor or expert "
    "parallelism), say so in its placements, or give each a name of its own."
)


def _refuse(different: Sequence[tuple[int, Different]], members: Members) -> None:
    """Raise in all processes if one has found replicas that differ. Each knows only of boxes that it holds."""
    answers = members.gather([[turn, list(one)] for turn, one in different[: 2 * SHOWN]])
    found = {(turn, key): (name, key, parties) for one in answers for turn, (name, key, parties) in one}
    if found:
        raise refusal([found[place] for place in sorted(found)], members)


def _digests(compared: Sequence[Mine]) -> list[int]:
    """For each box its code and, for each different value of it here, 64 bits of a digest."""
    return [
        number
        for one in compared
        for value in sorted({int(digest(read(one.name, shard))[:16], 16) for shard in one.shards})
        for number in (one.code, value)
    ]


def _sent(numbers: Sequence[int]) -> str:
    """Numbers of 64 bits as a JSON value."""
    return np.asarray(numbers, np.uint64).tobytes().hex()


def _by_code(codes: Sequence[int], answers: Sequence[str], width: int) -> Mapping[int, list[tuple[int, int]]]:
    """The rows of all processes that begin with one of ``codes``: for each code (process, last number), by process.

    ``width``: numbers of a row. Other processes' other rows are passed over without a look at each.
    """
    rows = [np.frombuffer(bytes.fromhex(one), np.uint64).reshape(-1, width) for one in answers]
    process = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    joined = np.concatenate(rows) if rows else np.empty((0, width), np.uint64)
    ours = np.isin(joined[:, 0], np.asarray(codes, np.uint64))
    found: dict[int, list[tuple[int, int]]] = {code: [] for code in codes}
    for row, index in zip(joined[ours].tolist(), process[ours].tolist(), strict=True):
        found[row[0]].append((index, row[-1]))
    return found


def _against(parties: Sequence[Sequence[int]], members: Members) -> str:
    if len({tuple(one) for one in parties}) == 1:
        return f"devices of {members.named(parties[0])} hold other values than each other"
    shown = " and ".join(members.named(one) for one in parties[:3])
    return f"{shown}{f' and {len(parties) - 3} more groups' if len(parties) > 3 else ''} hold other values"
