"""An engine's own optimizers by name, ``optax:lamb`` or ``torch:RAdam``: what both engines need to describe one. Its constants as
they were typed, its state by the names of a checkpoint, and the reasons to refuse it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean, nearest
from shardwright.core.model.optimizer import Kept, Optimizer, Value
from shardwright.training.optimizers import OPTIMIZER, OPTIMIZERS

PREFIX = OPTIMIZER
"""Before the names of its state, in a checkpoint."""

OURS = f"Give one that both engines have: {', '.join(sorted(OPTIMIZERS))}."

NOT_SET: Mapping[str, str] = {
    "learning_rate": "It is --lr, with its schedule.",
    "lr": "It is --lr, with its schedule.",
    "weight_decay": "It is --weight-decay, decoupled, the same for all optimizers.",
    "mask": "Matrices have weight decay, scales and biases do not.",
    "params": "They are the weights of the model.",
}
"""Parameters of an optimizer that a run sets: why none is given."""


def constants_of(
    optimizer: str, settings: Mapping[str, str], parameters: Iterable[str], given: Container[str]
) -> dict[str, Value]:
    """The constants of an optimizer, read as numbers, flags, none, or several numbers as 0.9/0.99.

    ``parameters``: those that it takes; ``given``: those of them that the engine sets. Raises InputError for any other.
    """
    known = [name for name in parameters if name not in NOT_SET and name not in given]
    for name in settings:
        if name in NOT_SET or name in given:
            why = NOT_SET.get(name, "The engine sets it.")
            raise InputError(f"--optimizer-set: {name} of {optimizer} cannot be set here. {why}")
        if name not in known:
            raise InputError(f"--optimizer-set: {optimizer} has no constant '{name}'. {did_you_mean(name, known)}")
    return {name: _read(name, text) for name, text in settings.items()}


def _read(name: str, text: str) -> Value:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        numbers = tuple(int(part) if part.isdecimal() else float(part) for part in text.split("/"))
    except ValueError:
        raise InputError(
            f"--optimizer-set: {name} is '{text}', and must be a number, true, false, none, or numbers with a slash "
            f"between, as 0.9/0.99."
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def kept_of(owners: Mapping[tuple[str, str], Iterable[str]], weights: Iterable[str]) -> tuple[Kept, ...]:
    """What is kept, of the weights that each prefix and dtype has."""
    every = frozenset(weights)
    return tuple(
        Kept(prefix=prefix, dtype=dtype, weights=None if frozenset(found) == every else frozenset(found))
        for (prefix, dtype), found in sorted(owners.items())
    )


def no_such(library: str, name: str, known: Iterable[str]) -> InputError:
    """For a name that the library has not."""
    match = nearest(name, known)
    offer = f"Did you mean '{library}:{match}'?" if match else f"Names are those of {library}'s documentation."
    return InputError(f"--optimizer: {library} has no optimizer '{name}'. {offer}")


def refused(optimizer: Optimizer, error: Exception) -> InputError:
    """For an optimizer that cannot be made with its constants, or needs more than gradients and weights."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(
        f"--optimizer {optimizer.text}: it cannot be made of these constants, or needs more than gradients and weights: "
        f"{text.rstrip('.')}. {OURS}"
    )


def other_dtype(optimizer: str, state: str, dtype: str) -> InputError:
    """For state that no checkpoint holds."""
    return InputError(
        f"--optimizer {optimizer}: its state '{state}' has dtype {dtype}, which no checkpoint holds. {OURS}"
    )


def other_shape(
    optimizer: str, state: str, shape: tuple[int, ...], weight: tuple[Any, tuple[int, ...]] | None
) -> InputError:
    """For state that no layout can shard as its weight. ``weight``: its name and shape, where it is of one weight."""
    of = "" if weight is None else f", and its weight {weight[1]}"
    return InputError(
        f"--optimizer {optimizer}: its state '{state}' has shape {shape}{of}. State is sharded, saved and resharded as its "
        f"weight is, so it must have the weight's shape. {OURS}"
    )
