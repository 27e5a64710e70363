"""Reads of several processes together: each piece once, passed on in rounds over the collectives that the processes have.

All processes call ``read_together`` for the same tensors in the same order. A process that cannot read takes part in the round all
the same, and says so: then all end, with one message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from shardwright.checkpoint.exchange.schedule import KeptNeeds, Round, Send, schedule_of, seed_of
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.format.dtypes import DTYPES, numpy_dtype
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import TensorInfo
from shardwright.checkpoint.reading.stored import Stored
from shardwright.checkpoint.reading.streams import empty
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import ShardwrightError
from shardwright.storage.url import Place

Result = TypeVar("Result")

DONE, MORE, FAILED = range(3)
"""What a process says before each round: all its elements are there, it has another round, or it cannot go on."""

DAMAGED, FAILS, BETWEEN = "damaged", "failed", "between"
"""What failed in a process: it found damage, it could not read, or something else went wrong between two reads."""


class Carrier(Protocol):
    """The processes of a load, from the view of one of them. Every process calls the same functions in the same order."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def noun(self) -> str:
        """What a message calls a process."""
        ...

    def largest(self, number: int) -> int:
        """The largest number that any process gives."""
        ...

    def texts(self, text: str) -> Sequence[str]:
        """The texts of all processes, by process."""
        ...

    def exchange(self, now: Round, sent: np.ndarray) -> np.ndarray:
        """The bytes that all processes send to this one in a round, those of the first process first. uint8, one dim.

        ``sent``: the bytes to every process, one after the other; to and from each the parcels of the round in their order.
        """
        ...


class Source(Protocol):
    """Tensors that several processes read together."""

    @property
    def directory(self) -> Place: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def stored(self, name: str) -> Stored:
        """The boxes of which one is read at a time."""
        ...

    def read_into(self, name: str, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Fills arrays of unsigned integers of the dtype's width. What several targets need is read once."""
        ...


def read_together(
    source: Source,
    name: str,
    boxes: Sequence[Box],
    wants: Sequence[Want],
    carrier: Carrier,
    *,
    raw: bool = False,
    kept: KeptNeeds | None = None,
) -> list[np.ndarray]:
    """The elements of boxes as new arrays, read by all processes: what several of them need is read by one, which sends it to the others.

    ``wants``: what each process needs of this tensor; this one, all elements of ``boxes`` and no others. ``kept``: of the reads before.

    Raises in every process if a read fails in one: DamagedError if any found damage, in all of them the same; else its own
    error in that process, and in the others a CheckpointError that names it.
    """
    attempt = _Attempt()
    work = attempt.of(_Work.of, source, name, boxes, wants, carrier, kept or KeptNeeds())
    number = 0
    while True:
        sent = attempt.of(work.sent, number) if work else None
        state = FAILED if attempt.error else MORE if work and number < work.num_rounds else DONE
        state = carrier.largest(state)
        if state == FAILED:
            raise _error_of_all(carrier, source, name, attempt.error)
        assert work is not None
        assert sent is not None
        if state == DONE:
            return work.results(raw=raw)
        attempt.of(work.take, number, carrier.exchange(work.round(number), sent))
        number += 1


class _Attempt:
    """The first error of what this process does for itself. Nothing is done after it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def of(self, do: Callable[..., Result], *arguments: Any) -> Result | None:
        if self.error is None:
            try:
                return do(*arguments)
            except Exception as error:
                self.error = error
        return None


def _error_of_all(
    carrier: Carrier, source: Source, name: str, own: Exception | None, *, between: bool = False
) -> Exception:
    """The error that this process ends with, when one process has failed. ``between``: ``own`` is not of a read."""
    kind = DAMAGED if isinstance(own, DamagedError) else BETWEEN if between else FAILS
    text = str(own) if isinstance(own, ShardwrightError) else f"{type(own).__name__}: {own}"
    answers = [answer.partition("\n") for answer in carrier.texts("" if own is None else f"{kind}\n{text}")]
    for kind, _, found in answers:
        if kind == DAMAGED:
            first, *lines = found.split("\n")
            return DamagedError(first, lines=lines)
    if own is not None:
        return own
    process, kind, found = next((process, kind, found) for process, (kind, _, found) in enumerate(answers) if kind)
    first, *lines = found.split("\n")
    who = f"{carrier.noun} {process} of {carrier.count}"
    failed = (
        f"{who} ended its load"
        if kind == BETWEEN
        else f"tensor '{name}': {who} could not read its part, which others need too"
    )
    return CheckpointError(f"{source.directory}: {failed}. Its error: {first}", lines=lines)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each begins, if they follow each other."""
    return [0, *accumulate(sizes)][:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The load of one tensor by one process. ``targets``: its boxes with their arrays, which are filled.

    ``round``: by its number; ``held``: what others still need of the units that were read, as arrays of unsigned integers.
    """

    source: Source
    name: str
    count: int
    num_rounds: int
    round: Callable[[int], Round]
    targets: Sequence[tuple[Box, np.ndarray]]
    held: dict[Box, Mapping[Box, np.ndarray]]

    @classmethod
    def of(
        cls,
        source: Source,
        name: str,
        boxes: Sequence[Box],
        wants: Sequence[Want],
        carrier: Carrier,
        kept: KeptNeeds,
    ) -> _Work:
        """Begins with what only this process needs."""
        own = [box for want in wants if carrier.index in want.processes for box in want.boxes]
        assert sum(box.size for box in own) == sum(box.size for box in boxes), (name, own, boxes)
        schedule = schedule_of(source.stored(name), wants, carrier.index, seed_of(name), kept)
        bits = DTYPES[source.tensors[name].dtype].bits
        place = f"{source.directory}: tensor '{name}'"
        targets = [(box, empty(box.shape, bits, f"{place}, box [{box}]")) for box in boxes]
        work = cls(
            source=source,
            name=name,
            count=carrier.count,
            num_rounds=schedule.num_rounds,
            round=lru_cache(maxsize=1)(schedule.round),
            targets=targets,
            held={},
        )
        for parts in schedule.alone:
            source.read_into(name, work.places(parts))
        return work

    def results(self, *, raw: bool) -> list[np.ndarray]:
        dtype = DTYPES[self.source.tensors[self.name].dtype]
        return [array.view(dtype.raw if raw else numpy_dtype(dtype, self.name)) for _, array in self.targets]

    def sent(self, number: int) -> np.ndarray:
        """Reads the units of a round, fills what this process needs of them, and returns the bytes to the others."""
        to = self.round(number).bytes_to(self.count)
        places = starts(to)
        data = empty((sum(to),), np.dtype(np.uint8), f"{self.source.directory}: tensor '{self.name}'")
        for one in self.round(number).sends:
            if one.relayed:
                arrays = {part: self._copy(part) for part in one.parts}
            else:
                if one.unit not in self.held:
                    self.held[one.unit] = self._read(one)
                arrays = self.held.pop(one.unit) if one.ends else self.held[one.unit]
            for parcel in one.parcels:
                for part in parcel.parts:
                    array = arrays[part].reshape(-1).view(np.uint8)
                    data[places[parcel.process] : places[parcel.process] + len(array)] = array
                    places[parcel.process] += len(array)
        return data

    def take(self, number: int, arrived: np.ndarray) -> None:
        """Fills what has arrived in a round."""
        places, bits = starts(self.round(number).bytes_from(self.count)), self._bits
        for parcel in self.round(number).arrivals:
            for part in parcel.parts:
                start = places[parcel.process]
                places[parcel.process] = stop = start + part.size * bits.itemsize
                elements = arrived[start:stop].view(bits).reshape(part.shape)
                for common, array in self.places([part]):
                    array[...] = elements[(*common.within(part).slices, ...)]

    def places(self, parts: Sequence[Box]) -> list[tuple[Box, np.ndarray]]:
        """Where this process has parts of the tensor: each box, and a view of the array that is to have it."""
        return [
            (common, array[(*common.within(box).slices, ...)])
            for part in parts
            for box, array in self.targets
            if (common := box.intersect(part)) is not None
        ]

    def _read(self, send: Send) -> Mapping[Box, np.ndarray]:
        """Reads a unit once: what this process needs of it goes to its place; returns what others need."""
        place = f"{self.source.directory}: tensor '{self.name}'"
        arrays = {part: empty(part.shape, self._bits, place) for part in send.parts}
        self.source.read_into(self.name, [*self.places(send.own), *arrays.items()])
        return arrays

    def _copy(self, part: Box) -> np.ndarray:
        """A part of the tensor that this process has got already."""
        box, array = next(target for target in self.targets if target[0].contains(part))
        return np.ascontiguousarray(array[(*part.within(box).slices, ...)])

    @property
    def _bits(self) -> np.dtype:
        return DTYPES[self.source.tensors[self.name].dtype].bits


class Together:
    """A source that all processes of a load read together: as the source itself, to the code of one process.

    Every process calls ``read_boxes`` for the same tensors in the same order. ``wants``: of each tensor what each process needs.
    """

    def __init__(self, source: Source, wants: Callable[[str], Sequence[Want]], carrier: Carrier) -> None:
        self._source, self._wants, self._carrier = source, wants, carrier
        self._broken, self._kept = False, KeptNeeds()

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> list[np.ndarray]:
        """As ``read_together``."""
        try:
            wants = self._wants(name)
            return read_together(self._source, name, boxes, wants, self._carrier, raw=raw, kept=self._kept)
        except Exception:
            # All processes know of it, or can no longer be reached.
            self._broken = True
            raise

    def all_do(self, do: Callable[[], Result]) -> Result:
        """The result of ``do``, which reads tensors, once it is done in all processes. It raises in all where it raises in one.

        What raises between two reads would leave the others waiting in the next one.
        """
        attempt = _Attempt()
        result = attempt.of(do)
        if not self._broken and self._carrier.largest(FAILED if attempt.error else DONE) == FAILED:
            raise _error_of_all(self._carrier, self._source, "", attempt.error, between=True)
        if attempt.error:
            raise attempt.error
        return cast(Result, result)


def together_or_alone(source: object, do: Callable[[], Result]) -> Result:
    """The result of ``do``, which reads a source: where all processes read it together, as ``Together.all_do``."""
    return source.all_do(do) if isinstance(source, Together) else do()
