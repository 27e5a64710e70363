"""A policy of recomputation and its notation: what layers keep for their backward pass. All else is made again there.

| notation | meaning |
|---|---|
| ``full`` | a layer keeps its input alone |
| ``dots`` | and every product of tokens with a weight, except the experts' |
| ``none`` | and all else that the backward pass reads, and the gathered weights: nothing is made again |
| ``keep=A,B`` | ``full``, with activations A and B kept |
| ``host=A,B`` | they are kept in the memory of the host |
| ``dots,keep=A,host=B,recompute=C`` | ``dots``, changed |
| ``full@0:16+none`` | for layers 0 to 15 ``full``, for all others ``none`` |
| ``full@::2+none`` | for every second layer |
| ``keep=A@moe_layers+full`` | for the layers of a stack |

Names are those of the model's table, ``weights`` stands for the gathered weights. A layer takes the first part that has it; without one,
``full``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import nearest
from shardwright.core.model.names import STREAM

BASES = ("full", "dots", "none")
"""Policies by name."""

CHANGES = ("keep", "host", "recompute")
"""What changes them, each with names of activations."""

INPUT = STREAM
"""The input of a layer, from which all else can be made: it is kept under every policy, on the device or on the host."""

WEIGHTS = "weights"
"""The name of a layer's gathered weights."""

GRAMMAR = (
    "A policy is full, dots or none; or names of activations, as keep=attention.output,host=residual.stream; or several for "
    "some layers each, as full@0:16+none"
)
SLICE = re.compile(r"(?:(\d+)?:(\d+)?(?::(\d+))?|(\d+))")
LARGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Some layers of a model: ``start``, ``stop`` and ``step`` as in a slice of Python, or all layers of a stack."""

    start: int = 0
    stop: int | None = None
    step: int = 1
    stack: str | None = None

    def has(self, number: int, stack: str) -> bool:
        """Whether a layer is one of them. ``number``: in the model, from 0."""
        if self.stack is not None:
            return stack == self.stack
        inside = number >= self.start and (self.stop is None or number < self.stop)
        return inside and (number - self.start) % self.step == 0

    @property
    def text(self) -> str:
        if self.stack is not None:
            return self.stack
        stop = "" if self.stop is None else str(self.stop)
        return f"{self.start or ''}:{stop}" + ("" if self.step == 1 else f":{self.step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What some layers keep. ``base``: a policy by name, which the other fields change. ``layers`` None: all that no part before has."""

    base: str = "full"
    keep: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    layers: Layers | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it gives."""
        return (*self.keep, *self.host, *self.recompute)

    @property
    def text(self) -> str:
        changes = [f"{how}={','.join(names)}" for how in CHANGES if (names := getattr(self, how))]
        base = [] if changes and self.base == BASES[0] else [self.base]
        return ",".join([*base, *changes]) + ("" if self.layers is None else f"@{self.layers.text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy of all layers of a model."""

    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """In the notation above.

        >>> read_policy("full,keep=attention.output,attention.queries@0:16+none").text
        'keep=attention.output,attention.queries@:16+none'
        """
        return "+".join(part.text for part in self.parts)

    def of_layer(self, number: int, stack: str) -> Part:
        """What a layer keeps. ``number``: in the model, from 0."""
        return next((part for part in self.parts if part.layers is None or part.layers.has(number, stack)), Part())


@lru_cache(maxsize=256)
def read_policy(text: str, option: str = "remat") -> Policy:
    """The policy of a text. Raises InputError for a text that is none. ``option``: where it was given, for the error.

    >>> read_policy("dots").parts, read_policy("full@::2+none").parts[0].layers
    ((Part(base='dots', keep=(), host=(), recompute=(), layers=None),), Layers(start=0, stop=None, step=2, stack=None))
    """
    if text not in BASES and not set(text) & set("=@+,"):
        near = nearest(text, BASES)
        hint = f" Did you mean '{near}'?" if near else ""
        raise InputError(f"{option} is {text!r}, and must be one of {', '.join(BASES)}, or a policy.{hint} {GRAMMAR}.")
    parts = tuple(_part(one, text, option) for one in text.split("+"))
    for part, later in pairwise(parts):
        if part.layers is None:
            raise InputError(
                f"{option}: '{part.text}' is for all layers, so that '{later.text}' after it has none. "
                f"Say for which layers it is, as {part.text}@0:16, or put it last."
            )
    return Policy(parts=parts)


def gathering_again(text: str) -> str:
    """The policy of a text, under which every layer gathers its weights again.

    >>> gathering_again("none"), gathering_again("dots")
    ('none,recompute=weights', 'dots')
    """
    parts = (
        replace(part, recompute=(*part.recompute, WEIGHTS))
        if part.base == "none" and WEIGHTS not in part.names
        else part
        for part in read_policy(text).parts
    )
    return Policy(parts=tuple(parts)).text


def part_of(base: str, changes: Mapping[str, Iterable[str]], layers: str | None, where: str) -> Part:
    """A part from its fields. Raises InputError, which begins with ``where``, for fields that contradict each other."""
    named = {how: tuple(dict.fromkeys(names)) for how, names in changes.items()}
    seen: dict[str, str] = {}
    for how, names in named.items():
        for name in names:
            if name in seen:
                raise InputError(
                    f"{where}: '{name}' is under '{seen[name]}' and under '{how}'. Leave it out of one of them."
                )
            seen[name] = how
    if INPUT in named.get("recompute", ()):
        raise InputError(
            f"{where}: '{INPUT}' is the input of a layer, from which all else is made again. Keep it, or put it on the host: host={INPUT}."
        )
    if WEIGHTS in named.get("host", ()):
        raise InputError(
            f"{where}: gathered weights are kept on the device or gathered again. Give keep={WEIGHTS} or leave them out."
        )
    return Part(base=base, **named, layers=None if layers is None else layers_of(layers, where))


def _part(text: str, entire: str, option: str) -> Part:
    where = f"{option} {entire!r}"
    body, at, layers = text.partition("@")
    base, changes, how = BASES[0], {}, None
    for number, word in enumerate(body.split(",")):
        key, equals, name = word.partition("=")
        if equals:
            if key not in CHANGES:
                near = nearest(key, CHANGES)
                hint = f"Did you mean '{near}'?" if near else f"Known: {', '.join(CHANGES)}."
                raise InputError(f"{where}: there is no '{key}='. {hint}")
            how = key
        elif number == 0 and word in BASES:
            base = word
            continue
        elif word in BASES:
            raise InputError(f"{where}: '{word}' is a policy by name, which stands first and once. Leave it out here.")
        elif how is None:
            near = nearest(word, BASES)
            hint = f"Did you mean '{near}'? " if near else ""
            said = f"'{word}' is no policy" if word else "a policy is missing"
            raise InputError(f"{where}: {said}. {hint}{GRAMMAR}.")
        else:
            name = word
        if not name:
            raise InputError(f"{where}: '{how}=' needs names of activations, as {how}=attention.output.")
        changes.setdefault(how, []).append(name)
    return part_of(base, changes, layers if at else None, where)


def layers_of(text: str, where: str) -> Layers:
    """Layers from a text: a number, a slice, or the name of a stack."""
    found = SLICE.fullmatch(text)
    if found is None:
        if not re.fullmatch(r"[a-z_]+", text):
            raise InputError(
                f"{where}: '{text}' names no layers. Give a slice, as 0:16 or ::2, a number, or a stack, as moe_layers."
            )
        return Layers(stack=text)
    start, stop, step, only = (None if one is None else min(int(one), LARGEST) for one in found.groups())
    if only is not None:
        return Layers(start=only, stop=only + 1)
    if step == 0 or (stop is not None and stop <= (start or 0)):
        raise InputError(f"{where}: '{text}' has no layer. Give a slice of some, as 0:16 or ::2.")
    return Layers(start=start or 0, stop=stop, step=step or 1)
