"""Lists in the value of one option, as ``fsdp=2,expert=4``. An error names the place in it and the expected form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from shardwright.core.findings.bounds import integer_of, number_text, within
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.findings.position import caret
from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES, Auto

MOVES: Mapping[str, tuple[str, ...]] = {"attention": ATTENTION_MOVES, "moe": MOE_MOVES}

EXAMPLES: Mapping[str, str] = {
    "--set": "num_layers=2 embed=64",
    "--optimizer-set": "b1=0.9 b2=0.99",
    "--xla": "xla_gpu_enable_latency_hiding_scheduler=true",
}

COUNTED: Mapping[str, str] = {
    "--devices": "devices",
    "--slices": "devices",
    "--mesh": "devices",
    "--batch": "rows",
    "--length": "tokens",
    "--microbatches": "microbatches",
    "--loss-chunks": "chunks",
}
"""What an option counts, as named in ``core.findings.bounds``."""


def mesh_sizes(text: str, option: str = "--mesh") -> dict[str, int | Auto]:
    """Sizes of mesh axes. The planner checks whether a layout has such axes, and whether a size is legal.

    >>> mesh_sizes("fsdp=auto,expert=4")
    {'fsdp': 'auto', 'expert': 4}
    """
    form = "AXIS=SIZE, with commas between, as in fsdp=2,expert=4"
    sizes: dict[str, int | Auto] = {}
    for key, value, start in _pairs(text, option, form):
        if value == "auto":
            sizes[key] = value
            continue
        try:
            sizes[key] = integer_of(value)
        except ValueError:
            message = f"'{value}' is not a whole number."
            raise _error(message, text, start + len(key) + 1, len(value), option, form) from None
    return sizes


def moves(text: str) -> dict[str, str]:
    """How keys and tokens move.

    >>> moves("attention=ring,moe=weights")
    {'attention': 'ring', 'moe': 'weights'}
    """
    form = "attention=HOW or moe=HOW, with a comma between, as in attention=ring,moe=all-to-all"
    chosen: dict[str, str] = {}
    for key, value, start in _pairs(text, "--move", form):
        if key not in MOVES:
            message = f"nothing called '{key}' moves. {did_you_mean(key, MOVES)}"
            raise _error(message, text, start, len(key), "--move", form)
        if value not in MOVES[key]:
            message = f"'{key}' has no movement '{value}'. {did_you_mean(value, MOVES[key])}"
            raise _error(message, text, start + len(key) + 1, len(value), "--move", form)
        chosen[key] = value
    return chosen


def settings(groups: Iterable[Iterable[str]], option: str = "--set") -> dict[str, str]:
    """Dimensions of the model, from every ``--set`` together, or the constants of every ``--optimizer-set``.

    >>> settings([["num_layers=2", "embed=64"], ["vocab=512"]])
    {'num_layers': '2', 'embed': '64', 'vocab': '512'}
    """
    form = f"NAME=VALUE, with spaces between, as in {EXAMPLES[option]}"
    dimensions: dict[str, str] = {}
    for text in (text for group in groups for text in group):
        for key, value, start in _pairs(text, option, form):
            if key in dimensions:
                raise _error(f"'{key}' is set twice.", text, start, len(key), option, form)
            dimensions[key] = value
    return dimensions


def compiler_options(groups: Iterable[Iterable[str]], option: str = "--xla") -> dict[str, str]:
    """Options of a compiler, from every ``--xla`` together. A value may be a list with commas, or empty.

    >>> compiler_options([["xla_disable_hlo_passes=fusion,algsimp"], ["xla_gpu_enable_command_buffer="]])
    {'xla_disable_hlo_passes': 'fusion,algsimp', 'xla_gpu_enable_command_buffer': ''}
    """
    form = f"NAME=VALUE, with spaces between, as in {EXAMPLES[option]}"
    found: dict[str, str] = {}
    for text in (text for group in groups for text in group):
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            missing = "name" if equals else "value"
            raise _error(f"'{text}' has no {missing}.", text, 0, max(1, len(text)), option, form)
        if key in found:
            raise _error(f"'{key}' is set twice.", text, 0, len(key), option, form)
        found[key] = value
    return found


def at_least_one(option: str, value: int | None) -> None:
    """Raises InputError for a count below 1, or above the bound of what the option counts."""
    if value is None:
        return
    if value < 1:
        raise InputError(f"{option} is {number_text(value)}, and must be at least 1.")
    within(option, value, COUNTED[option.split()[0]])


def above_zero(option: str, value: float | None) -> None:
    """Raises InputError for a number that is not above 0, or not finite."""
    if value is not None and not 0 < value < inf:
        raise InputError(f"{option} is {value:g}, and must be a finite number above 0.")


def _pairs(text: str, option: str, form: str) -> Iterable[tuple[str, str, int]]:
    """Key, value and the place of the key, one after the other."""
    seen: set[str] = set()
    start = 0
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not part.strip():
            raise _error("something is missing here.", text, start, 1, option, form)
        if not equals or not key.strip() or not value.strip():
            missing = "name" if equals and not key.strip() else "value"
            raise _error(f"'{part}' has no {missing}.", text, start, len(part), option, form)
        lead = len(key) - len(key.lstrip())
        if key.strip() in seen:
            raise _error(f"'{key.strip()}' occurs twice.", text, start + lead, len(key.strip()), option, form)
        seen.add(key.strip())
        yield key.strip(), value.strip(), start + lead
        start += len(part) + 1


def _error(message: str, text: str, start: int, length: int, option: str, form: str) -> InputError:
    return InputError(f"{option}: {message}\n{caret(text, start, start + length)}\nExpected: {form}.")
