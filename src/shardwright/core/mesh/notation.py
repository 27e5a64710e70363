"""The notation, parsed and printed: ``batch/data/fsdp length/expert embed``.

One word per tensor dim: its logical axis, then the mesh axes that shard it, major first, each after a slash.
The grammar is in docs/notation.md. ``str(spec)`` is the inverse of ``parse``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.findings.errors import NotationError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.mesh.spec import DimSpec, Spec

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Word:
    """One name of a notation text and its place in the text."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParsedSpec:
    """A spec with, for each dim, the place of its logical axis and of each of its mesh axes in the text."""

    spec: Spec
    text: str
    words: tuple[tuple[Word, ...], ...]

    def place_of(self, dim: int) -> tuple[int, int]:
        """Start and stop of a dim's word, axes included."""
        return self.words[dim][0].start, self.words[dim][-1].stop


def parse(
    text: str, *, known_axes: Iterable[str] | None = None, known_logical_axes: Iterable[str] | None = None
) -> Spec:
    """The spec of a notation text.

    Raises NotationError, with a caret under the place, for an invalid name, an axis that shards two dims, a
    logical axis that occurs twice and, if the known names are given, an unknown name.

    >>> parse("embed/fsdp heads/tensor head_dim").axes_of("heads")
    ('tensor',)
    """
    return parse_with_places(text, known_axes=known_axes, known_logical_axes=known_logical_axes).spec


def parse_with_places(
    text: str, *, known_axes: Iterable[str] | None = None, known_logical_axes: Iterable[str] | None = None
) -> ParsedSpec:
    """As ``parse``, with the place of every name, for carets."""
    axes_known = None if known_axes is None else list(known_axes)
    logical_known = None if known_logical_axes is None else list(known_logical_axes)
    dims: list[tuple[Word, ...]] = []
    seen_logical: dict[str, int] = {}
    seen_axes: dict[str, tuple[int, str]] = {}
    for match in re.finditer(r"\S+", text):
        words = _split_word(text, match.start(), match.group())
        logical, *sharding = words
        dim = len(dims)
        if logical.name in seen_logical:
            raise _error(
                f"logical axis '{logical.name}' occurs twice in one tensor (dims {seen_logical[logical.name]} and {dim}). "
                f"Give the second a name of its own, as in 'embed' and 'embed_out'.",
                text,
                logical,
            )
        if logical_known is not None and logical.name not in logical_known:
            raise _error(
                f"no logical axis is called '{logical.name}'. {did_you_mean(logical.name, logical_known)}",
                text,
                logical,
            )
        seen_logical[logical.name] = dim
        for axis in sharding:
            if axes_known is not None and axis.name not in axes_known:
                raise _error(f"the mesh has no axis '{axis.name}'. {did_you_mean(axis.name, axes_known)}", text, axis)
            if axis.name in seen_axes:
                first_dim, first_logical = seen_axes[axis.name]
                if first_dim == dim:
                    message = f"mesh axis '{axis.name}' occurs twice on dim {dim} ('{logical.name}'). Write it once."
                else:
                    message = (
                        f"mesh axis '{axis.name}' would shard two dims of one tensor: '{first_logical}' (dim {first_dim}) "
                        f"already has it. Remove it from '{first_logical}' or from '{logical.name}'."
                    )
                raise _error(message, text, Word(logical.name, logical.start, words[-1].stop))
            seen_axes[axis.name] = (dim, logical.name)
        dims.append(tuple(words))
    spec = Spec(tuple(DimSpec(words[0].name, tuple(word.name for word in words[1:])) for words in dims))
    return ParsedSpec(spec, text, tuple(dims))


def place_in(spec: Spec, dim: int) -> tuple[int, int]:
    """Start and stop of a dim's word in ``str(spec)``.

    >>> place_in(parse("heads/tensor kv_heads"), 1)
    (13, 21)
    """
    start = sum(len(str(earlier)) + 1 for earlier in spec.dims[:dim])
    return start, start + len(str(spec.dims[dim]))


def _split_word(text: str, start: int, word: str) -> list[Word]:
    words: list[Word] = []
    place = start
    for part in word.split("/"):
        here = Word(part, place, place + len(part))
        if not NAME.fullmatch(part):
            what = f"'{part}' is not a name" if part else "a name is missing here"
            raise _error(
                f"{what}. A dim is a logical axis, then '/' and a mesh axis for each that shards it: 'batch/data/fsdp'.",
                text,
                here,
            )
        words.append(here)
        place = here.stop + 1
    return words


def _error(message: str, text: str, word: Word) -> NotationError:
    return NotationError(message, text=text, start=word.start, stop=word.stop)
