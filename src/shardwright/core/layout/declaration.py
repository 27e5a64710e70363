"""What a layout declares, as plain data: every role written out, no comments. And the changes since an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.core.findings.position import Position
from shardwright.core.layout.layout import Layout, MeshEntry, RoleEntry, Rule
from shardwright.core.layout.wording import every

PLAIN_OPTIONS = ("keep_gathered", "optimizer", "gradients", "virtual", "schedule")
"""The options of an axis that are None unless they are set."""

OPTIONS = ("weights", "sequence_parallel", *PLAIN_OPTIONS)
"""The options of an axis, in addition to its roles."""

MOVED = ("attention", "moe")
"""The keys of ``move`` in a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredChange:
    """One statement that has changed. ``position``: its place now; None if it is no longer there."""

    where: str
    before: str
    now: str
    position: Position | None = None

    @property
    def text(self) -> str:
        return f"{self.where} is {self.now}, and was {self.before}"

    def to_json(self) -> dict[str, object]:
        return {"where": self.where, "before": self.before, "after": self.now}


def declaration(layout: Layout) -> dict[str, Any]:
    """The layout as JSON. If it is read as a layout file, it gives every tensor the same placement as the layout."""
    return {
        "name": layout.name,
        "mesh": {axis: _size(entry) for axis, entry in layout.mesh.items()},
        "roles": {axis: _roles(entry) for axis, entry in layout.entries.items()},
        "move": {"attention": layout.move_attention, "moe": layout.move_moe},
        **({"rules": _rules(layout.rules)} if layout.rules else {}),
    }


def plain_options(entry: RoleEntry) -> list[str]:
    """The options of an entry besides its roles, as they are written: ``optimizer: shard``, ``keep_gathered: true``."""
    values = {name: getattr(entry, name) for name in PLAIN_OPTIONS}
    return [f"{name}: {_written(value)}" for name, value in values.items() if value is not None]


def declared_changes(before: Mapping[str, Any], layout: Layout) -> tuple[DeclaredChange, ...]:
    """The statements of the declaration ``before`` that differ in a layout. Names are not compared."""
    now = declaration(layout)
    return (
        *_mesh_changes(before["mesh"], now["mesh"], layout),
        *_role_changes(before, now, layout),
        *(
            DeclaredChange(
                where=f"move of '{what}'",
                before=_shown(before["move"].get(what)),
                now=_shown(how),
                position=layout.positions.get("move"),
            )
            for what, how in now["move"].items()
            if before["move"].get(what) != how
        ),
        *_rule_changes(before.get("rules", {}), now.get("rules", {}), layout),
    )


def _size(entry: MeshEntry) -> object:
    return entry.size if entry.link is None else {"size": entry.size, "link": entry.link}


def _roles(entry: RoleEntry) -> dict[str, object]:
    """Every component with its role, then the options that are set."""
    weights = list(entry.weights) if isinstance(entry.weights, tuple) else entry.weights
    options: dict[str, object] = {} if weights is None else {"weights": weights}
    if entry.sequence_parallel:
        options["sequence_parallel"] = True
    options |= {name: value for name in PLAIN_OPTIONS if (value := getattr(entry, name)) is not None}
    return {**entry.roles, **options}


def _rules(rules: tuple[Rule, ...]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for rule in rules:
        found.setdefault(rule.component, {})[rule.logical_axis] = list(rule.axes)
    return found


def _mesh_changes(before: Mapping[str, Any], now: Mapping[str, Any], layout: Layout) -> Iterator[DeclaredChange]:
    for axis in dict.fromkeys((*now, *before)):
        if before.get(axis) != now.get(axis):
            entry = layout.mesh.get(axis)
            yield DeclaredChange(
                where=f"mesh axis '{axis}'",
                before=_shown(before.get(axis)),
                now=_shown(now.get(axis)),
                position=entry.position if entry else layout.positions.get("mesh"),
            )
    common = [[axis for axis in side if axis in before and axis in now] for side in (before, now)]
    if common[0] != common[1]:
        place = layout.positions.get("mesh")
        where = "the order of the mesh axes"
        yield DeclaredChange(where=where, before=", ".join(before), now=", ".join(now), position=place)


def _role_changes(before: Mapping[str, Any], now: Mapping[str, Any], layout: Layout) -> Iterator[DeclaredChange]:
    """Components that change in the same way are one statement. Axes that are on one side only are changes of the mesh."""
    sides = (before["roles"], now["roles"])
    for axis in dict.fromkeys((*now["roles"], *before["roles"])):
        if (axis in before["mesh"]) != (axis in now["mesh"]):
            continue
        old_roles, new_roles = (side.get(axis, {}) for side in sides)
        changed: dict[tuple[str, str], list[str]] = {}
        for what in dict.fromkeys((*new_roles, *old_roles)):
            pair = (_shown(old_roles.get(what)), _shown(new_roles.get(what)))
            if pair[0] != pair[1]:
                changed.setdefault(pair, []).append(what)
        for (old, new), whats in changed.items():
            options = [what for what in whats if what in OPTIONS]
            components = [what for what in whats if what not in OPTIONS]
            named = [f"option '{option}' of '{axis}'" for option in options]
            if components:
                named.append(f"the role of '{axis}' in {every(components)}")
            entry = layout.entries.get(axis)
            for where in named:
                yield DeclaredChange(where=where, before=old, now=new, position=entry.position if entry else None)


def _rule_changes(before: Mapping[str, Any], now: Mapping[str, Any], layout: Layout) -> Iterator[DeclaredChange]:
    places = {(rule.component, rule.logical_axis): rule.position for rule in layout.rules}
    keys = [(component, name) for side in (now, before) for component, rules in side.items() for name in rules]
    for component, name in dict.fromkeys(keys):
        old, new = (side.get(component, {}).get(name) for side in (before, now))
        if old != new:
            yield DeclaredChange(
                where=f"the rule for '{name}' in '{component}'",
                before=_shown(old),
                now=_shown(new),
                position=places.get((component, name), layout.positions.get("rules")),
            )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    """
    >>> _shown("fsdp"), _shown(["a", "b"]), _shown({"size": 2, "link": "dcn"}), _shown(True), _shown(None)
    ("'fsdp'", '[a, b]', '2 over dcn', 'true', 'not there')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, list):
        return f"[{', '.join(str(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{value.get('size')} over {value.get('link')}"
    return "not there" if value is None else str(value)
