"""A layout as the text of a file of its own, which reads back as the same layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.core.findings.position import Located, Position
from shardwright.core.layout.layout import Layout, RoleEntry
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.role_reading import roles_everywhere
from shardwright.core.layout.roles import COMPONENTS
from shardwright.files.scalar import plain_value
from shardwright.files.yaml_text import parse_yaml

PLAIN = re.compile(r"[A-Za-z_][\w -]*[\w]|[A-Za-z_]")


def layout_text(layout: Layout) -> str:
    """YAML, an axis a line.

    >>> from shardwright.layouts import load_layout
    >>> print(layout_text(load_layout("ep-as-cp")).splitlines()[-1])
      expert: {elsewhere: context, moe: expert}
    """
    width = max(len(axis) for axis in layout.entries) + 1
    lines = [f"name: {_scalar(layout.name)}"]
    if layout.about:
        lines.append(f"about: {_scalar(layout.about)}")
    lines.append(f"mesh: {{{', '.join(f'{axis}: {entry.size}' for axis, entry in layout.mesh.items())}}}")
    lines.append("roles:")
    lines += [f"  {axis + ':':<{width}} {_entry(entry)}" for axis, entry in layout.entries.items()]
    moves = {"attention": (layout.move_attention, "gather"), "moe": (layout.move_moe, "all-to-all")}
    said = [f"{what}: {how}" for what, (how, default) in moves.items() if how != default]
    if said:
        lines.append(f"move: {{{', '.join(said)}}}")
    if layout.rules:
        lines.append("rules:")
        for component in dict.fromkeys(rule.component for rule in layout.rules):
            cuts = (f"{r.logical_axis}: [{', '.join(r.axes)}]" for r in layout.rules if r.component == component)
            lines.append(f"  {component}: {{{', '.join(cuts)}}}")
    return "\n".join(lines) + "\n"


def same_layout(layout: Layout, source: str, places: Mapping[str, Position | None]) -> Layout:
    """The layout as its own text reads: what a user will have.

    Nobody has that text in a file yet, so each axis has the place where ``source``, the file that is imported, speaks of
    it (``places``), and all else the start of that file.
    """
    start = Position(source=source, line=1, column=1)
    top = parse_yaml(layout_text(layout), source)
    assert isinstance(top.value, Mapping)
    homes = {axis: place or start for axis, place in places.items()}
    return read_layout(_at(top, start, dict.fromkeys(("mesh", "roles"), homes)))


def _at(node: Located, place: Position, inside: Mapping[str, Any]) -> Located:
    """A value with its places replaced. ``inside``: by key the place of what stands there, or the same a level below."""
    value = node.value
    if isinstance(value, tuple):
        return Located(value=tuple(_at(item, place, {}) for item in value), position=place)
    if not isinstance(value, Mapping):
        return Located(value=value, position=place)
    keys = {key: inside[key] if isinstance(inside.get(key), Position) else place for key in value}
    below = {key: inside[key] if isinstance(inside.get(key), Mapping) else {} for key in value}
    return Located(
        value={key: _at(item, keys[key], below[key]) for key, item in value.items()},
        position=place,
        key_positions=keys,
    )


def entry_of(roles: Mapping[str, str], *, sequence_parallel: bool = False, weights=None) -> RoleEntry:
    """The shortest entry that gives each component its role: `elsewhere` for the commonest, and names for the others."""
    best: tuple[int, dict[str, str], str] | None = None
    for elsewhere in dict.fromkeys(roles.values()):
        if elsewhere == "expert":
            continue
        spread = roles_everywhere({}, elsewhere, sequence_parallel=sequence_parallel)
        named = {c: roles[c] for c in COMPONENTS if roles[c] != spread[c]}
        if best is None or len(named) < best[0]:
            best = (len(named), named, elsewhere)
    assert best is not None, roles
    _, named, elsewhere = best
    return RoleEntry(
        roles=dict(roles),
        declared=frozenset(named),
        elsewhere=elsewhere,
        weights=weights,
        sequence_parallel=sequence_parallel,
    )


def _entry(entry: RoleEntry) -> str:
    parts = [] if entry.elsewhere is None else [f"elsewhere: {entry.elsewhere}"]
    parts += [f"{component}: {entry.roles[component]}" for component in COMPONENTS if component in entry.declared]
    if isinstance(entry.weights, tuple):
        parts.append(f"weights: [{', '.join(entry.weights)}]")
    elif entry.weights:
        parts.append(f"weights: {entry.weights}")
    if entry.sequence_parallel:
        parts.append("sequence_parallel: true")
    return str(entry.elsewhere) if len(parts) == 1 and entry.elsewhere else f"{{{', '.join(parts)}}}"


def _scalar(text: str) -> str:
    """A text as YAML, quoted where it would be read as something else."""
    if PLAIN.fullmatch(text) and plain_value(text) == text:
        return text
    return "'" + text.replace("'", "''") + "'"
