"""Options that may change when a run goes on, and what each change means for the steps that follow.

The state of a run is its tensors, the steps done and the next row. An option may change if it is no part of them: then the
steps that follow are those of a program that switches the option there. The rows of another text, of another length or in
another order begin at row 0, because the number of a row means nothing among other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean

CHANGES = "changes"
"""The field of a checkpoint's metadata with the changes of its run so far."""

Effect = Literal["rate", "update", "average", "batch", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changeable:
    """``key``: of the run fingerprint. ``effect``: on the learning rate, the update, the average of the weights, the rows of a step,
    or which rows there are."""

    key: str
    effect: Effect


CHANGEABLE: Mapping[str, Changeable] = {
    "lr": Changeable(key="lr", effect="rate"),
    "warmup": Changeable(key="warmup", effect="rate"),
    "steps": Changeable(key="steps", effect="rate"),
    "weight-decay": Changeable(key="weight_decay", effect="update"),
    "clip": Changeable(key="clip", effect="update"),
    "average": Changeable(key="average", effect="average"),
    "batch": Changeable(key="batch", effect="batch"),
    "length": Changeable(key="length", effect="rows"),
    "data": Changeable(key="corpus", effect="rows"),
    "seed": Changeable(key="seed", effect="rows"),
}
"""By the names that ``--change`` takes, which are those of the options."""

NAME_OF = {one.key: name for name, one in CHANGEABLE.items()}
UNCOMPARED = ("tokenizer", "weights")
"""Paths: the effect of the tokenizer on the text is in ``corpus``, and a run that goes on reads no other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An option that changed after ``step`` steps. ``name``: of the option. Of a text, its digests."""

    step: int
    name: str
    was: Any
    now: Any

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "name": self.name, "was": self.was, "is": self.now}


def may_not_change(name: str) -> str:
    """Why a name is refused.

    >>> may_not_change("wramup")
    "'wramup' may not change. Did you mean 'warmup'?"
    """
    return f"'{name}' may not change. {did_you_mean(name, CHANGEABLE)}"


def changes_between(
    before: Mapping[str, Any], after: Mapping[str, Any], named: Sequence[str], step: int, where: str
) -> tuple[Change, ...]:
    """The options that change after ``step`` steps. ``before``, ``after``: run fingerprints; ``where``: names the first.

    Raises InputError for a difference that is not named, and for a schedule that ended before this step.
    """
    different = [key for key in after if before.get(key) != after[key] and key not in UNCOMPARED]
    unnamed = [key for key in different if NAME_OF.get(key) not in named]
    if unnamed:
        may = [NAME_OF[key] for key in unnamed if key in NAME_OF]
        also = f" So may {' and '.join(may)}, with --change {','.join([*named, *may])}." if may else ""
        other = "optimizer" in unnamed
        anew = f" To begin anew with its weights, give --weights {where} and another --out." if other else ""
        raise InputError(
            f"{where} was saved by a run with other options or text; going on would be another run:\n"
            + "\n".join(f"  {_difference(key, before.get(key), after[key])}" for key in unnamed)
            + f"\nGive the same options, or another --out. The layout and the mesh may change.{also}{anew}"
        )
    if "steps" in different and after["steps"] < step:
        raise InputError(
            f"--steps is {after['steps']:,}, and {step:,} steps are done. Give at least as many, or go back with --resume-from."
        )
    changed = [name for name in CHANGEABLE if CHANGEABLE[name].key in different]
    keys = {name: CHANGEABLE[name].key for name in changed}
    return tuple(Change(step=step, name=name, was=before.get(keys[name]), now=after[keys[name]]) for name in changed)


def other_rows(changes: Sequence[Change]) -> bool:
    """Whether the rows are other ones, so that they begin at row 0."""
    return any(CHANGEABLE[change.name].effect == "rows" for change in changes)


def recorded(metadata: Mapping[str, Any]) -> tuple[Change, ...]:
    """The changes that a checkpoint records. What is no change there is left out: anybody may have written it."""
    found = metadata.get(CHANGES)
    return tuple(
        Change(step=one["step"], name=one["name"], was=one["was"], now=one["is"])
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict)
        and {"step", "name", "was", "is"} <= one.keys()
        and isinstance(one["step"], int)
        and isinstance(one["name"], str)
    )


def _difference(key: str, was: Any, now: Any) -> str:
    name = NAME_OF.get(key, key)
    keeps = f"; --{name} {was} keeps it" if key in NAME_OF and key != "corpus" and was is not None else ""
    return f"{name}: was {was!r}, is {now!r}{keeps}"
