"""Reads a Layout from located values of a file or a program; every fault is a finding with its place."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwright.core.findings.bounds import BOUNDS, is_integer, number_text
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.position import Located, Position
from shardwright.core.layout.faults import Faults, shown
from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES, Auto, Layout, MeshEntry, Rule
from shardwright.core.layout.role_reading import read_roles
from shardwright.core.layout.roles import COMPONENTS, LOGICAL_AXES
from shardwright.core.mesh.mesh import LINKS
from shardwright.core.mesh.notation import NAME

TOP_KEYS = ("name", "about", "pays", "mesh", "roles", "move", "rules")
MESH_KEYS = ("size", "link")


def read_layout(source: Located, *, name: str | None = None) -> Layout:
    """The layout that the values declare. ``name`` is used if they give none.

    Raises FindingsError with every fault found (SW102, SW106, SW111, SW119, SW120), each at its place.
    """
    faults = Faults()
    top = faults.mapping(source, "the layout", TOP_KEYS)
    if not isinstance(source.value, Mapping):
        raise FindingsError(faults.findings)
    given = faults.text(top, "name", "the layout") or name
    if given is None and "name" not in top:
        faults.fault("SW120", source.position, "the layout", "no name", "a name", "Add 'name: my-layout'.")
    about, pays = faults.text(top, "about", "the layout"), faults.text(top, "pays", "the layout")
    mesh = _mesh(faults, top.get("mesh"), source.position)
    entries = read_roles(faults, top.get("roles"), source.position, mesh)
    move = faults.mapping(top["move"], "'move'", ("attention", "moe")) if "move" in top else {}
    attention = faults.choice(move, "attention", ATTENTION_MOVES, "gather")
    moe = faults.choice(move, "moe", MOE_MOVES, "all-to-all")
    rules = _rules(faults, top.get("rules"), tuple(mesh))
    if faults.findings:
        raise FindingsError(faults.findings)
    return Layout(
        name=given or "",
        about=about or "",
        pays=pays or "",
        mesh=mesh,
        entries={axis: entries[axis] for axis in mesh},
        move_attention=attention,
        move_moe=moe,
        rules=rules,
        source=source.position.source,
        positions={key: source.key_position(key) for key in top},
    )


def _mesh(faults: Faults, node: Located | None, position: Position) -> dict[str, MeshEntry]:
    if node is None:
        faults.fault("SW120", position, "the layout", "no mesh", "a mesh", "Add 'mesh: {fsdp: auto}'.")
        return {}
    values = faults.mapping(node, "'mesh'", None)
    if not values and isinstance(node.value, Mapping):
        faults.fault("SW120", node.position, "'mesh'", "no axis", "at least one axis", "Write 'mesh: {fsdp: auto}'.")
    if len(values) > BOUNDS["axes"].most:
        found, needed = f"{len(values):,} axes", f"at most {BOUNDS['axes'].most}"
        faults.fault("SW120", node.position, "'mesh'", found, needed, BOUNDS["axes"].fix)
    mesh: dict[str, MeshEntry] = {}
    for axis, value in values.items():
        if not NAME.fullmatch(axis):
            faults.fault(
                "SW120",
                node.key_position(axis),
                f"mesh axis '{axis}'",
                "a name that the notation cannot write",
                "a letter or '_', then letters, digits, '_' and '-'",
                f"Name it '{_writable(axis)}', here and under 'roles'.",
            )
        link = None
        size_node = value
        if isinstance(value.value, Mapping):
            fields = faults.mapping(value, f"mesh axis '{axis}'", MESH_KEYS)
            link = faults.choice(fields, "link", LINKS, None)
            size_node = fields.get("size", value)
        size = _size(faults, axis, size_node)
        mesh[axis] = MeshEntry(size=size, link=link, position=node.key_position(axis))
    return mesh


def _writable(axis: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", axis)
    return name if NAME.fullmatch(name) else f"axis_{name}"


def _size(faults: Faults, axis: str, node: Located) -> int | Auto:
    if node.value == "auto":
        return "auto"
    most = BOUNDS["devices"].most
    if is_integer(node.value) and node.value > most:
        faults.fault(
            "SW106",
            node.position,
            f"mesh axis '{axis}'",
            f"size {number_text(node.value)}",
            f"at most {most:,}",
            f"Write '{axis}: auto' for the remaining devices, or a smaller size.",
        )
        return 1
    if is_integer(node.value) and node.value >= 1:
        return node.value
    faults.fault(
        "SW106",
        node.position,
        f"mesh axis '{axis}'",
        f"size {shown(node.value)}",
        "a whole number of at least 1, or 'auto'",
        f"Write '{axis}: 1' for an axis that is not used.",
    )
    return 1


def _rules(faults: Faults, node: Located | None, axes: tuple[str, ...]) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for component, block in (faults.mapping(node, "'rules'", COMPONENTS) if node else {}).items():
        for logical, value in faults.mapping(block, f"rules of '{component}'", tuple(LOGICAL_AXES)).items():
            rules.append(
                Rule(
                    component=component,
                    logical_axis=logical,
                    axes=_ruled_axes(faults, f"rule for '{logical}' in '{component}'", value, axes),
                    position=block.key_position(logical),
                )
            )
    return tuple(rules)


def _ruled_axes(faults: Faults, where: str, node: Located, axes: tuple[str, ...]) -> tuple[str, ...]:
    items = node.value if isinstance(node.value, tuple) else (node,)
    ruled: list[str] = []
    for item in items:
        axis = shown(item.value, quote=False)
        if axis not in axes:
            faults.unknown(axis, item.position, where, axes, "mesh axis")
        elif axis in ruled:
            faults.fault(
                "SW102", item.position, where, f"axis '{axis}' twice", "each axis once", f"Write '{axis}' once."
            )
        else:
            ruled.append(axis)
    return tuple(ruled)
