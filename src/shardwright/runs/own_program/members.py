"""The processes of a user's own program, from the view of one of them: they exchange values, and fail together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwright.checkpoint import CheckpointError
from shardwright.core.findings.errors import ShardwrightError
from shardwright.runs.own_program.witnesses import Witness, ended, this_process
from shardwright.runs.processes.group import ExchangedValue

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The processes, of which this one has the number ``index``.

    ``noun``: what a message calls one. ``gather``: every process gives a JSON value, and gets those of all, by process.
    It is also a barrier.
    """

    index: int
    count: int
    noun: str
    gather: Callable[[Any], list[Any]]

    def exchange(self, name: str, value: Any, timeout_s: float = 0.0) -> Sequence[ExchangedValue]:
        """The different values of all processes, each with the first process that gave it. The processes' own timeout holds."""
        del name, timeout_s
        found: dict[str, ExchangedValue] = {}
        for process, each in enumerate(self.gather(value)):
            found.setdefault(json.dumps(each), ExchangedValue(each, process))
        return list(found.values())

    def distinct(self, value: Any) -> list[ExchangedValue]:
        """The different values of all processes, as ``exchange``; of equal values only one is sent."""
        number = hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
        different = self.exchange("digests", number)
        if len(different) == 1:
            return [ExchangedValue(value, different[0].process)]
        mine = any(one.process == self.index for one in different)
        answers = self.gather(value if mine else None)
        return [ExchangedValue(answers[one.process], one.process) for one in different]

    def all_do(self, what: str, do: Callable[[], Result]) -> list[Result]:
        """The results of ``do`` by process; a result is a JSON value.

        Raises in every process if ``do`` raised in one: there its own error, in the others a CheckpointError that names it.
        """
        result, raised = None, None
        try:
            result = do()
        except Exception as error:
            raised = error
        answers = self.gather([None if raised is None else _text(raised), result])
        if raised is not None:
            raise raised
        for process, (failure, _) in enumerate(answers):
            if failure is not None:
                first, *lines = failure.split("\n")
                raise CheckpointError(
                    f"{what}: {self.noun} {process} of {self.count} could not do it. Its error: {first}", lines=lines
                )
        return [answer for _, answer in answers]

    def here(self, what: str, do: Callable[[], Result]) -> Result:
        """The result of ``do`` in this process, of any type, once it has succeeded in every process. Raises as ``all_do``."""
        kept: list[Result] = []
        self.all_do(what, lambda: kept.append(do()))
        return kept[0]

    def named(self, processes: Sequence[int]) -> str:
        """The words for some processes.

        >>> alone(noun="rank").named([0, 2, 3])
        'ranks 0, 2 and 3'
        """
        if len(processes) == 1:
            return f"{self.noun} {processes[0]}"
        shown = [str(one) for one in processes[:8]] + ([f"{len(processes) - 8} more"] if len(processes) > 8 else [])
        return f"{_plural(self.noun)} {', '.join(shown[:-1])} and {shown[-1]}"


def connected(
    index: int, count: int, noun: str, gather: Callable[[Any], list[Any]], lost: tuple[type[Exception], ...]
) -> Members:
    """Members whose exchanges end with a CheckpointError that names the processes that have ended, as far as one can see it.

    ``lost``: what ``gather`` raises where a process has.
    """
    known: list[Witness] = []

    def watched(value: Any) -> list[Any]:
        try:
            if known:
                return gather(value)
            # With the first value, each says where it can be seen.
            answers = gather([this_process(), value])
        except lost as error:
            why = "one of them has ended, or their timeout has passed"
            if known and (gone := ended(known, index)):
                named = ", ".join(f"{noun} {one} (process {known[one]['pid']} on {known[one]['host']})" for one in gone)
                why = f"{named} {'has' if len(gone) == 1 else 'have'} ended, killed or with an error"
            raise CheckpointError(
                f"the {count} {_plural(noun)} could not exchange values: {why}. {str(error).splitlines()[0]}"
            ) from error
        known.extend(witness for witness, _ in answers)
        return [answer for _, answer in answers]

    return Members(index=index, count=count, noun=noun, gather=watched)


def alone(noun: str = "process") -> Members:
    """A program of one process."""
    return Members(index=0, count=1, noun=noun, gather=lambda value: [value])


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
