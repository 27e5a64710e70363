"""What all devices must hold alike is compared: weights after the first step of a run, and small tensors before each save, of which a
checkpoint keeps one replica and would hide the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from shardwright.checkpoint import CheckpointError, OwnedBox
from shardwright.runs.processes.group import ExchangedValue, Exchanging


class _Held(NamedTuple):
    """The bits of the elements of a box on one device of a process."""

    process: int
    bits: Sequence[int]

    def shown(self, place: int) -> str:
        return repr(float(np.uint32(self.bits[place]).view(np.float32)))


class HeldReplica(NamedTuple):
    """A box of a weight on a device of this process, which other devices hold too. ``device``: its number in the mesh. ``axes``: those that
    shard the weight, ``fsdp tensor``."""

    device: int
    axes: str
    box: OwnedBox


def unequal_weights(held: Iterable[HeldReplica], group: Exchanging, step: int) -> str | None:
    """What to say, in all processes, where a box of a weight has other bits on another device after a step; None where all are equal.

    All processes call this. They exchange a digest for each set of axes, and a digest for each weight where these differ.
    """
    by_device: dict[tuple[str, int], dict[str, str]] = {}
    for replica in held:
        array = replica.box.array() if callable(replica.box.array) else replica.box.array
        key = f"'{replica.box.name}' [{replica.box.box}]"
        by_device.setdefault((replica.axes, replica.device), {})[key] = xxhash.xxh3_64_hexdigest(
            np.ascontiguousarray(array).tobytes()
        )
    mine: dict[str, list[str]] = {}
    for (axes, _), digests in by_device.items():
        boxes, bits = (_digest(texts) for texts in (digests, map(" ".join, digests.items())))
        mine[f"{axes}: {boxes}"] = sorted({*mine.get(f"{axes}: {boxes}", ()), bits})
    if not _differing(group.exchange(f"the weights after step {step}", mine)):
        return None
    found: dict[str, set[str]] = {}
    for digests in by_device.values():
        for key, digest in digests.items():
            found.setdefault(key, set()).add(digest)
    listed = {key: sorted(digests) for key, digests in found.items()}
    differing = _differing(group.exchange(f"each weight after step {step}", listed))
    first = min(differing)
    num = len(differing) - 1
    more = f" {num} more {'differs' if num == 1 else 'differ'} too." if num else ""
    return (
        f"step {step}: weight {first} must have the same bits on all devices that hold it, and has not (processes "
        f"{', '.join(map(str, differing[first]))}).{more} This step was not saved. A device has read or computed other values: start again from "
        f"the newest checkpoint, and if it happens again, leave the machine out."
    )


def _digest(texts: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(texts)).encode())


def _differing(answers: Sequence[ExchangedValue]) -> dict[str, list[int]]:
    """The keys with several digests, each with the processes whose answers show it."""
    digests: dict[str, set[str]] = {}
    processes: dict[str, list[int]] = {}
    for answer in answers:
        for key, found in answer.value.items():
            digests.setdefault(key, set()).update(found)
            processes.setdefault(key, []).append(answer.process)
    return {key: processes[key] for key, found in digests.items() if len(found) > 1}


def require_equal(held: Iterable[OwnedBox], group: Exchanging, step: int) -> None:
    """Raises CheckpointError (SW502), in all processes, where one box has other bits on another device.

    ``held``: the boxes of small float32 tensors that this process holds, a replica on each of its devices too. All processes call this; they
    exchange a digest of each.
    """
    arrays: dict[str, list[np.ndarray]] = {}
    for one in held:
        array = one.array() if callable(one.array) else one.array
        arrays.setdefault(f"'{one.name}' [{one.box}]", []).append(np.ascontiguousarray(array))
    mine = {
        key: sorted({xxhash.xxh3_64_hexdigest(one.tobytes()) for one in replicas}) for key, replicas in arrays.items()
    }
    digests: dict[str, set[str]] = {}
    for answer in group.exchange(f"the replicas of step {step}", mine):
        for key, found in answer.value.items():
            digests.setdefault(key, set()).update(found)
    different = sorted(key for key, found in digests.items() if len(found) > 1)
    if different:
        first = different[0]
        bits = [one.reshape(-1).view("<u4").tolist() for one in arrays.get(first, ())]
        answers = group.exchange(f"the values that differ in step {step}", bits)
        raise _error([_Held(one.process, each) for one in answers for each in one.value], different, step)


def _error(held: Sequence[_Held], different: Sequence[str], step: int) -> CheckpointError:
    """``held``: of the first of ``different``."""
    first, other, place = next(
        (held[0], one, place)
        for one in held[1:]
        for place, (ours, theirs) in enumerate(zip(held[0].bits, one.bits, strict=True))
        if ours != theirs
    )
    ours, theirs = first.shown(place), other.shown(place)
    where = (
        f"{ours} in process {first.process}, {theirs} in process {other.process}"
        if first.process != other.process
        else f"{ours} and {theirs} on devices of process {first.process}"
    )
    num = len(different) - 1
    more = f" {num} more {'tensor differs' if num == 1 else 'tensors differ'} too." if num else ""
    return CheckpointError(
        f"the checkpoint of step {step}: {different[0]} must be the same on all devices that hold it, and element {place} is {where}."
        f"{more} Nothing was saved.",
        lines=[
            "A device has computed or received other amaxes in a step since the last checkpoint. Continue from that one with --resume; "
            "if it happens again, leave this machine out."
        ],
        code="SW502",
    )
