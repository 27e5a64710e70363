"""The origin of an operation of a compiled program: its phase, component, tensors and source line.

An operation's name is the path of its scopes, innermost last, and then the operation itself:
`jit(step)/transpose(jvp(component=attention))/tensor=layers.attention.q/reduce_scatter`. Merged operations have one
name with alternatives: `jit(step)/(a/all_gather:b/all_gather)`, or several names, `a/add;b/mul`.

| in the name | phase |
|---|---|
| `rematted_computation` | recompute |
| `transpose(` | backward |
| `phase=` | the one that it says: of a stage, whose passes are not differentiated |
| `jvp(` | forward |
| none of them | update |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwright.core.plan.plan import Phase

_COMPONENT = re.compile(r"component=([\w.\-]+)")
_PHASE = re.compile(r"phase=(forward|recompute|backward)")
_TENSOR = re.compile(r"tensor=([^/():;]+)")
_LINE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ROOTS = re.compile(r"^.*/(?:site-packages|src)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """``operation``: its name in the source program (`all_gather`, `dot_general`). None or empty: the compiler kept
    nothing, or merged operations differ."""

    component: str | None = None
    phase: Phase | None = None
    tensors: tuple[str, ...] = ()
    operation: str | None = None


NOWHERE = Origin()


@lru_cache(maxsize=65536)
def origins_of(op_name: str) -> tuple[Origin, ...]:
    """The origins of the operations that were merged into one.

    >>> for origin in origins_of("jit(f)/jvp()/(component=mlp/tensor=w/all_gather:component=mlp/tensor=v/all_gather)"):
    ...     print(origin.phase, origin.component, origin.tensors)
    forward mlp ('w',)
    forward mlp ('v',)
    >>> origins_of("jit(f)/transpose(jvp(component=mlp))/component=residual/psum")[0]
    Origin(component='residual', phase='backward', tensors=(), operation='psum')
    """
    # A name that is not a path is that of an argument: it identifies the value, not an operation.
    return tuple(_origin(name) if "/" in name else NOWHERE for name in _alternatives(op_name))


def merged(origins: Iterable[Origin]) -> Origin:
    """What merged operations have in common, with the tensors of all of them.

    An operation without a component does not conflict with the component of the others.

    >>> one, other = Origin(component="mlp", tensors=("up",)), Origin(component="attention", tensors=("q",))
    >>> merged([one, other])
    Origin(component=None, phase=None, tensors=('up', 'q'), operation=None)
    >>> merged([one, Origin()]).component
    'mlp'
    """
    found = [origin for origin in origins if origin != NOWHERE]
    return Origin(
        component=_same(origin.component for origin in found),
        phase=_same(origin.phase for origin in found),
        tensors=tuple(dict.fromkeys(tensor for origin in found for tensor in origin.tensors)),
        operation=_same(origin.operation for origin in found),
    )


def filled(origin: Origin, other: Origin) -> Origin:
    """An origin whose missing fields are taken from another."""
    return replace(
        origin,
        component=origin.component or other.component,
        phase=origin.phase or other.phase,
        tensors=origin.tensors or other.tensors,
    )


@dataclass(frozen=True, slots=True)
class Sources:
    """Source lines by the frame ids of instructions."""

    by_frame: Mapping[int, str]

    @classmethod
    def of(cls, tables: Mapping[str, Sequence[str]]) -> Sources:
        """From the tables at the head of a program's text.

        >>> Sources.of({"FileNames": ['1 "/a/src/b.py"'], "FileLocations": ["7 {file_name_id=1 line=3}"],
        ...             "StackFrames": ["9 {file_location_id=7}"]}).of_instruction("), metadata={stack_frame_id=9}")
        'b.py:3'
        """
        files = {number: text.strip('"') for number, text in map(_numbered, tables.get("FileNames", ()))}
        lines: dict[int, str] = {}
        for number, text in map(_numbered, tables.get("FileLocations", ())):
            file, line = _named(text, "file_name_id"), _named(text, "line")
            if file in files:
                lines[number] = f"{_short(files[file])}:{line}"
        frames = map(_numbered, tables.get("StackFrames", ()))
        places = {number: _named(text, "file_location_id") for number, text in frames}
        return cls({frame: lines[place] for frame, place in places.items() if place in lines})

    def of_instruction(self, rest: str) -> str | None:
        """``file:line`` of an instruction, innermost; the file relative to the folder from which Python imports it."""
        if "stack_frame_id=" in rest and (frame := _FRAME.search(rest)):
            return self.by_frame.get(int(frame[1]))
        if "source_file=" in rest and (line := _LINE.search(rest)):
            return f"{_short(line[1])}:{line[2]}" if line[2] else _short(line[1])
        return None


def _origin(name: str) -> Origin:
    components, tensors = _COMPONENT.findall(name), _TENSOR.findall(name)
    return Origin(
        component=components[-1] if components else None,
        phase=_phase(name),
        tensors=(tensors[-1],) if tensors else (),
        operation=name.rpartition("/")[2] or None,
    )


def _phase(name: str) -> Phase:
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    if said := _PHASE.findall(name):
        return said[-1]
    return "forward" if "jvp(" in name else "update"


def _alternatives(name: str) -> list[str]:
    """The full names of merged operations.

    >>> _alternatives("jit(f)/(a/x:b/(c:d))"), _alternatives("jit(f)/a;b/add")
    (['jit(f)/a/x', 'jit(f)/b/c', 'jit(f)/b/d'], ['jit(f)/a', 'jit(f)/b/add'])
    """
    if ";" in name:
        first, *others = name.split(";")
        # The other names begin where they differ from the first, which the text does not mark; they have its phase.
        before = first[: first.rfind("/") + 1] if "component=" not in first else first[: first.find("component=")]
        return [
            one for alternative in (first, *(before + other for other in others)) for one in _alternatives(alternative)
        ]
    if ":" not in name:
        return [name]
    for start in [0, *(place + 1 for place, char in enumerate(name) if char == "/")]:
        if start < len(name) and name[start] == "(":
            stop, colons = _group(name, start)
            if colons:
                alternatives = [
                    name[low + 1 : high] for low, high in zip([start, *colons], [*colons, stop], strict=True)
                ]
                return [
                    one
                    for alternative in alternatives
                    for one in _alternatives(name[:start] + alternative + name[stop + 1 :])
                ]
    return [name]


def _group(name: str, start: int) -> tuple[int, list[int]]:
    """The position that closes the parenthesis at ``start``, and the colons that separate its alternatives."""
    depth, colons = 0, []
    for place in range(start, len(name)):
        char = name[place]
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place, colons
        if char == ":" and depth == 1:
            colons.append(place)
    return len(name), []


def _same(found: Iterable[Any]) -> Any:
    """The common value of those that are not None; None if they differ."""
    there = {one for one in found if one is not None}
    return there.pop() if len(there) == 1 else None


def _numbered(line: str) -> tuple[int, str]:
    number, _, text = line.partition(" ")
    return int(number), text


def _named(text: str, attribute: str) -> int:
    found = re.search(rf"\b{attribute}=(\d+)", text)
    return int(found[1]) if found else 0


def _short(path: str) -> str:
    """A file name without the folders that depend on the machine."""
    return _ROOTS.sub("", path)
