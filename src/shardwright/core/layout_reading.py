"""From located values, as a file or a program gives them, to a Layout; every fault is a finding with its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shardwright.core.codes import CODES
from shardwright.core.errors import FindingsError
from shardwright.core.finding import Finding
from shardwright.core.layout import ATTENTION_MOVES, MOE_MOVES, Layout, MeshEntry, RoleEntry, Rule
from shardwright.core.nearest import did_you_mean, nearest
from shardwright.core.position import Located, Position
from shardwright.core.roles import COMPONENTS, LOGICAL_AXES, ROLES, SEQUENCE_PARALLEL

TOP_KEYS = ("name", "about", "pays", "mesh", "roles", "move", "rules")
MESH_KEYS = ("size", "link")
ENTRY_OPTIONS = ("elsewhere", "weights", "sequence_parallel")
KEPT_FREE = ("gradients", "optimizer", "keep_gathered", "virtual", "schedule")
LINKS = ("ici", "dcn")


def read_layout(source: Located, *, name: str | None = None) -> Layout:
    """The layout that the values declare. ``name`` stands in where they give none.

    Raises FindingsError with every fault found (SW102, SW106, SW111, SW119, SW120), each at its place.
    """
    return _Reader().layout(source, name)


class _Reader:
    """Collects faults, so that one reading tells them all."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def fault(self, code: str, position: Position, where: str, found: str, needed: str, fix: str = "") -> None:
        self.findings.append(
            Finding(
                code=code,
                severity=CODES[code].severity,
                position=position,
                where=where,
                found=found,
                needed=needed,
                fix=fix,
            )
        )

    def layout(self, source: Located, name: str | None) -> Layout:
        top = self.mapping(source, "the layout", TOP_KEYS)
        given = self.text(top, "name", "the layout") or name
        if given is None:
            self.fault("SW120", source.position, "the layout", "no name", "a name", "Add 'name: my-layout'.")
        mesh = self.mesh(top.get("mesh"), source.position)
        entries = self.roles(top.get("roles"), source.position, mesh)
        move = self.mapping(top["move"], "'move'", ("attention", "moe")) if "move" in top else {}
        layout_move = {
            "attention": self.choice(move, "attention", ATTENTION_MOVES, "gather"),
            "moe": self.choice(move, "moe", MOE_MOVES, "all-to-all"),
        }
        rules = self.rules(top.get("rules"), tuple(mesh))
        if self.findings:
            raise FindingsError(self.findings)
        return Layout(
            name=given or "",
            about=self.text(top, "about", "the layout") or "",
            pays=self.text(top, "pays", "the layout") or "",
            mesh=mesh,
            entries={axis: entries[axis] for axis in mesh},
            move_attention=layout_move["attention"],
            move_moe=layout_move["moe"],
            rules=rules,
            source=source.position.source,
            positions={key: source.key_position(key) for key in top},
        )

    def mesh(self, node: Located | None, position: Position) -> dict[str, MeshEntry]:
        if node is None:
            self.fault("SW120", position, "the layout", "no mesh", "a mesh", "Add 'mesh: {fsdp: auto}'.")
            return {}
        mesh: dict[str, MeshEntry] = {}
        for axis, value in self.mapping(node, "'mesh'", None).items():
            where = f"mesh axis '{axis}'"
            link = None
            size_node = value
            if isinstance(value.value, Mapping):
                parts = self.mapping(value, where, MESH_KEYS)
                link = self.choice(parts, "link", LINKS, None)
                size_node = parts.get("size", value)
            size = size_node.value
            if not (size == "auto" or (isinstance(size, int) and not isinstance(size, bool))):
                self.fault(
                    "SW106",
                    size_node.position,
                    where,
                    f"size {_shown(size)}",
                    "a whole number of at least 1, or 'auto'",
                )
                size = 1
            mesh[axis] = MeshEntry(size=size, link=link, position=node.key_position(axis))
        if not mesh and not self.findings:
            self.fault("SW120", node.position, "'mesh'", "no axis", "at least one axis", "Write 'mesh: {fsdp: auto}'.")
        return mesh

    def roles(self, node: Located | None, position: Position, mesh: Mapping[str, MeshEntry]) -> dict[str, RoleEntry]:
        if node is None:
            self.fault("SW120", position, "the layout", "no roles", "a role for each mesh axis", "Add 'roles:'.")
            return {}
        entries: dict[str, RoleEntry] = {}
        for axis, value in self.mapping(node, "'roles'", None).items():
            if axis not in mesh:
                self.fault(
                    "SW111",
                    node.key_position(axis),
                    f"roles of '{axis}'",
                    f"the mesh has no axis '{axis}'",
                    f"one of {', '.join(mesh)}",
                    did_you_mean(axis, mesh),
                )
                continue
            entries[axis] = self.entry(axis, value, node.key_position(axis))
        for axis, declared in mesh.items():
            if axis not in entries and declared.position is not None:
                self.fault(
                    "SW120",
                    declared.position,
                    f"mesh axis '{axis}'",
                    "no entry under 'roles'",
                    "one role in each component",
                    f"Add '{axis}: idle' if it is to do nothing.",
                )
        return entries

    def entry(self, axis: str, node: Located, position: Position) -> RoleEntry:
        where = f"roles of '{axis}'"
        if not isinstance(node.value, Mapping):
            role = self.role(node, where)
            return self.spread(axis, {}, role, None, False, position)
        named: dict[str, tuple[str, Position]] = {}
        for key, value in node.value.items():
            if key in KEPT_FREE:
                self.fault(
                    "SW111",
                    node.key_position(key),
                    where,
                    f"option '{key}'",
                    "an option that exists: this word is kept for later",
                    f"Take '{key}' out.",
                )
            elif key in COMPONENTS:
                role = self.role(value, f"{where} in '{key}'")
                if role is not None:
                    named[key] = (role, value.position)
            elif key not in ENTRY_OPTIONS:
                self.unknown(key, node.key_position(key), where, (*COMPONENTS, *ENTRY_OPTIONS), "component or option")
        elsewhere = self.role(node.value["elsewhere"], where) if "elsewhere" in node.value else None
        if elsewhere is None and "elsewhere" not in node.value and set(named) != set(COMPONENTS):
            missing = [c for c in COMPONENTS if c not in named]
            self.fault(
                "SW120",
                position,
                where,
                f"no role in {', '.join(missing)}",
                "one role in each component",
                "Add 'elsewhere: idle', or the role it has there.",
            )
        parallel = node.value.get("sequence_parallel")
        if parallel is not None and not isinstance(parallel.value, bool):
            self.fault(
                "SW120", parallel.position, where, f"sequence_parallel {_shown(parallel.value)}", "true or false"
            )
        entry = self.spread(axis, named, elsewhere, self.weights(node), bool(parallel and parallel.value), position)
        stores = any(ROLES[role].stores for role in entry.roles.values())
        if entry.weights is not None and not stores:
            self.fault(
                "SW119",
                node.key_position("weights"),
                where,
                "option 'weights' on an axis that never stores weights cut",
                "role fsdp or context in some component",
                "Take 'weights' out.",
            )
        if entry.sequence_parallel and "tensor" not in entry.roles.values():
            self.fault(
                "SW119",
                node.key_position("sequence_parallel"),
                where,
                "option 'sequence_parallel' on an axis that is nowhere 'tensor'",
                "role tensor",
                "Take 'sequence_parallel' out.",
            )
        return entry

    def spread(
        self,
        axis: str,
        named: Mapping[str, tuple[str, Position]],
        elsewhere: str | None,
        weights: Literal["whole"] | tuple[str, ...] | None,
        sequence_parallel: bool,
        position: Position,
    ) -> RoleEntry:
        """Give each component its role: the named one, else `elsewhere`, else idle where that has nothing to cut."""
        roles: dict[str, str] = {}
        for component in COMPONENTS:
            role, place = named.get(component, (elsewhere or "idle", position))
            can = components_of(role, sequence_parallel=sequence_parallel)
            if component not in can and component in named:
                self.fault(
                    "SW119",
                    place,
                    f"roles of '{axis}' in '{component}'",
                    f"role '{role}'",
                    f"a role that has something to cut there; '{role}' stands in {', '.join(can)}",
                    f"Write '{component}: idle', or leave '{component}' out.",
                )
            roles[component] = role if component in can else "idle"
        if elsewhere == "expert":
            self.fault(
                "SW119",
                position,
                f"roles of '{axis}'",
                "role 'expert' outside 'moe'",
                "a role that has something to cut outside 'moe'",
                f"Write '{axis}: {{elsewhere: fsdp, moe: expert}}'.",
            )
        return RoleEntry(
            roles=roles,
            declared=frozenset(named),
            elsewhere=elsewhere,
            weights=weights,
            sequence_parallel=sequence_parallel,
            position=position,
        )

    def weights(self, node: Located) -> Literal["whole"] | tuple[str, ...] | None:
        assert isinstance(node.value, Mapping)
        option = node.value.get("weights")
        if option is None or option.value == "whole":
            return None if option is None else "whole"
        items = option.value if isinstance(option.value, tuple) else (option,)
        names: list[str] = []
        for item in items:
            if isinstance(item.value, str) and item.value in LOGICAL_AXES:
                names.append(item.value)
            else:
                self.unknown(
                    str(item.value), item.position, "option 'weights'", ("whole", *LOGICAL_AXES), "logical axis"
                )
        return tuple(names)

    def rules(self, node: Located | None, axes: tuple[str, ...]) -> tuple[Rule, ...]:
        rules: list[Rule] = []
        for component, block in (self.mapping(node, "'rules'", COMPONENTS) if node else {}).items():
            for logical, value in self.mapping(block, f"rules of '{component}'", tuple(LOGICAL_AXES)).items():
                items = value.value if isinstance(value.value, tuple) else (value,)
                where = f"rule for '{logical}' in '{component}'"
                cuts: list[str] = []
                for item in items:
                    axis = str(item.value)
                    if axis not in axes:
                        self.unknown(axis, item.position, where, axes, "mesh axis")
                    elif axis in cuts:
                        self.fault("SW102", item.position, where, f"axis '{axis}' twice", "each axis once")
                    else:
                        cuts.append(axis)
                rules.append(
                    Rule(
                        component=component,
                        logical_axis=logical,
                        axes=tuple(cuts),
                        position=block.key_position(logical),
                    )
                )
        return tuple(rules)

    def role(self, node: Located, where: str) -> str | None:
        if isinstance(node.value, str) and node.value in ROLES:
            return node.value
        self.unknown(_shown(node.value, quote=False), node.position, where, tuple(ROLES), "role")
        return None

    def mapping(self, node: Located, where: str, keys: tuple[str, ...] | None) -> Mapping[str, Located]:
        if not isinstance(node.value, Mapping):
            self.fault("SW120", node.position, where, _shown(node.value), "a mapping of names to values")
            return {}
        known = {}
        for key, value in node.value.items():
            if keys is not None and key not in keys:
                self.unknown(key, node.key_position(key), where, keys, "key")
            else:
                known[key] = value
        return known

    def choice(self, values: Mapping[str, Located], key: str, options: tuple[str, ...], default: Any) -> Any:
        node = values.get(key)
        if node is None or node.value in options:
            return default if node is None else node.value
        self.unknown(_shown(node.value, quote=False), node.position, f"'{key}'", options, "value")
        return default

    def text(self, values: Mapping[str, Located], key: str, where: str) -> str | None:
        node = values.get(key)
        if node is None or isinstance(node.value, str):
            return None if node is None else str(node.value)
        self.fault("SW120", node.position, where, f"{key} {_shown(node.value)}", "a text")
        return None

    def unknown(self, name: str, position: Position, where: str, known: tuple[str, ...], what: str) -> None:
        match = nearest(name, known)
        self.fault(
            "SW111",
            position,
            where,
            f"unknown {what} '{name}'",
            f"one of {', '.join(known)}",
            f"Write '{match}'." if match else "",
        )


def components_of(role: str, *, sequence_parallel: bool) -> tuple[str, ...]:
    """Where a role has something to cut; ``tensor`` cuts the residual too when its entry is sequence-parallel."""
    can = ROLES[role].components
    if role == "tensor" and sequence_parallel:
        return tuple(c for c in COMPONENTS if c in can or c == SEQUENCE_PARALLEL[0])
    return can


def _shown(value: object, *, quote: bool = True) -> str:
    """A value as a user wrote it, near enough for a message."""
    if isinstance(value, str):
        return f"'{value}'" if quote else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, tuple) else str(value)
