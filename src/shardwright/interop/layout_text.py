"""A layout as the text of a layout file, which reads back as the same layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.core.findings.position import Located, Position
from shardwright.core.layout.declaration import plain_options
from shardwright.core.layout.layout import Layout, RoleEntry
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.role_reading import roles_everywhere
from shardwright.core.layout.roles import COMPONENTS
from shardwright.files.scalar import plain_value
from shardwright.files.yaml_text import parse_yaml

PLAIN = re.compile(r"[A-Za-z_][\w -]*[\w]|[A-Za-z_]")


def layout_text(layout: Layout) -> str:
    """YAML, one line for each axis.

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
    not_default = [f"{what}: {how}" for what, (how, default) in moves.items() if how != default]
    if not_default:
        lines.append(f"move: {{{', '.join(not_default)}}}")
    if layout.rules:
        lines.append("rules:")
        for component in dict.fromkeys(rule.component for rule in layout.rules):
            dims = (f"{r.logical_axis}: [{', '.join(r.axes)}]" for r in layout.rules if r.component == component)
            lines.append(f"  {component}: {{{', '.join(dims)}}}")
    return "\n".join(lines) + "\n"


def same_layout(layout: Layout, source: str, places: Mapping[str, Position | None]) -> Layout:
    """The layout as parsed from its own text: the one that a user will load.

    That text is in no file yet. So each axis has its position in ``source``, the imported file (``places``), and everything
    else has the start of that file.
    """
    start = Position(source=source, line=1, column=1)
    top = parse_yaml(layout_text(layout), source)
    assert isinstance(top.value, Mapping)
    of_axes = {axis: place or start for axis, place in places.items()}
    return read_layout(_at(top, start, dict.fromkeys(("mesh", "roles"), of_axes)))


def _at(node: Located, place: Position, inside: Mapping[str, Any]) -> Located:
    """A value with its positions replaced. ``inside``: by key the position of that entry, or a mapping for the level below."""
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
    """The shortest entry that gives each component its role: `elsewhere` for the most frequent role, names for the others."""
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
    fields = [] if entry.elsewhere is None else [f"elsewhere: {entry.elsewhere}"]
    fields += [f"{component}: {entry.roles[component]}" for component in COMPONENTS if component in entry.declared]
    if isinstance(entry.weights, tuple):
        fields.append(f"weights: [{', '.join(entry.weights)}]")
    elif entry.weights:
        fields.append(f"weights: {entry.weights}")
    if entry.sequence_parallel:
        fields.append("sequence_parallel: true")
    fields += plain_options(entry)
    return str(entry.elsewhere) if len(fields) == 1 and entry.elsewhere else f"{{{', '.join(fields)}}}"


def _scalar(text: str) -> str:
    """A text as a YAML scalar, quoted where YAML would parse it as something else."""
    if PLAIN.fullmatch(text) and plain_value(text) == text:
        return text
    return "'" + text.replace("'", "''") + "'"
