"""The roles of a layout, from located values: one role for each mesh axis in each component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from shardwright.core.findings.bounds import is_integer
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.findings.position import Located, Position
from shardwright.core.layout.faults import Faults, shown
from shardwright.core.layout.layout import MeshEntry, RoleEntry, Shard
from shardwright.core.layout.roles import COMPONENTS, LOGICAL_AXES, ROLES, SCHEDULES, SEQUENCE_PARALLEL

STAGE_OPTIONS = ("virtual", "schedule")
UPDATE_OPTIONS = ("optimizer", "gradients")
ENTRY_OPTIONS = ("elsewhere", "weights", "keep_gathered", "sequence_parallel", *UPDATE_OPTIONS, *STAGE_OPTIONS)

Weights = Literal["whole"] | tuple[str, ...] | None


def read_roles(
    faults: Faults, node: Located | None, position: Position, mesh: Mapping[str, MeshEntry]
) -> dict[str, RoleEntry]:
    """An entry for each mesh axis; ``position`` is that of the layout."""
    if node is None:
        faults.fault("SW120", position, "the layout", "no roles", "a role for each mesh axis", "Add 'roles:'.")
        return {}
    entries: dict[str, RoleEntry] = {}
    for axis, value in faults.mapping(node, "'roles'", None).items():
        if axis in mesh:
            entries[axis] = _entry(faults, axis, value, node.key_position(axis))
        elif mesh:
            faults.fault(
                "SW111",
                node.key_position(axis),
                f"roles of '{axis}'",
                f"the mesh has no axis '{axis}'",
                f"one of {', '.join(mesh)}",
                did_you_mean(axis, mesh),
            )
    for axis, declared in mesh.items():
        if axis not in entries:
            faults.fault(
                "SW120",
                declared.position or position,
                f"mesh axis '{axis}'",
                "no entry under 'roles'",
                "one role in each component",
                f"Add '{axis}: idle' if it is to do nothing.",
            )
    _gathered_together(faults, entries)
    return entries


def roles_everywhere(named: Mapping[str, str], elsewhere: str | None, *, sequence_parallel: bool) -> dict[str, str]:
    """Each component's role: the named one, else ``elsewhere``; idle where that has nothing to shard.

    >>> roles = roles_everywhere({"moe": "expert"}, "tensor", sequence_parallel=False)
    >>> roles["moe"], roles["mlp"], roles["residual"]
    ('expert', 'tensor', 'idle')
    """
    roles = {component: named.get(component, elsewhere or "idle") for component in COMPONENTS}
    return {
        component: role if component in components_of(role, sequence_parallel=sequence_parallel) else "idle"
        for component, role in roles.items()
    }


def components_of(role: str, *, sequence_parallel: bool) -> tuple[str, ...]:
    """Where a role has something to shard; ``tensor`` shards the residual too if its entry is sequence-parallel."""
    can = ROLES[role].components
    if role == "tensor" and sequence_parallel:
        return tuple(c for c in COMPONENTS if c in can or c == SEQUENCE_PARALLEL[0])
    return can


def _entry(faults: Faults, axis: str, node: Located, position: Position) -> RoleEntry:
    where = f"roles of '{axis}'"
    if not isinstance(node.value, Mapping):
        role = _role(faults, node, where)
        _expert_stays_inside(faults, axis, role, node.position)
        return _spread(faults, axis, {}, role, None, False, position)
    named = _named_roles(faults, where, node)
    stated = node.value.get("elsewhere")
    elsewhere = None if stated is None else _role(faults, stated, where)
    if stated is not None:
        _expert_stays_inside(faults, axis, elsewhere, stated.position)
    if stated is None and set(named) != set(COMPONENTS):
        missing = [component for component in COMPONENTS if component not in node.value]
        if missing:
            faults.fault(
                "SW120",
                position,
                where,
                f"no role in {', '.join(missing)}",
                "one role in each component",
                "Add 'elsewhere: idle', or the role it has there.",
            )
    parallel = _flag(faults, where, "sequence_parallel", node)
    weights = _weights(faults, node.value.get("weights"))
    entry = _spread(faults, axis, named, elsewhere, weights, parallel, position)
    entry = replace(
        entry,
        keep_gathered=_flag(faults, where, "keep_gathered", node) or None,
        virtual=_virtual(faults, where, node.value.get("virtual")),
        schedule=_schedule(faults, node.value.get("schedule")),
        **{name: _shard(faults, where, name, node.value.get(name)) for name in UPDATE_OPTIONS},
    )
    misread = (stated is not None and elsewhere is None) or any(c in node.value and c not in named for c in COMPONENTS)
    if not misread:
        _options_have_a_role(faults, where, node, entry)
        _stages_hold_whole_layers(faults, axis, where, entry)
    return entry


def _named_roles(faults: Faults, where: str, node: Located) -> dict[str, tuple[str, Position]]:
    """The roles of the components named in an entry; faults for other keys."""
    assert isinstance(node.value, Mapping)
    named: dict[str, tuple[str, Position]] = {}
    for key, value in node.value.items():
        if key in COMPONENTS:
            role = _role(faults, value, f"{where} in '{key}'")
            if role is not None:
                named[key] = (role, value.position)
        elif key not in ENTRY_OPTIONS:
            faults.unknown(key, node.key_position(key), where, (*COMPONENTS, *ENTRY_OPTIONS), "component or option")
    return named


def _spread(
    faults: Faults,
    axis: str,
    named: Mapping[str, tuple[str, Position]],
    elsewhere: str | None,
    weights: Weights,
    sequence_parallel: bool,
    position: Position,
) -> RoleEntry:
    for component, (role, place) in named.items():
        can = components_of(role, sequence_parallel=sequence_parallel)
        if component not in can:
            faults.fault(
                "SW119",
                place,
                f"roles of '{axis}' in '{component}'",
                f"role '{role}', which has nothing to shard in '{component}'",
                f"a role that has; '{role}' is allowed in {', '.join(can)}",
                f"Write '{component}: idle'.",
            )
    return RoleEntry(
        roles=roles_everywhere(
            {component: role for component, (role, _) in named.items()},
            elsewhere,
            sequence_parallel=sequence_parallel,
        ),
        declared=frozenset(named),
        elsewhere=elsewhere,
        weights=weights,
        sequence_parallel=sequence_parallel,
        position=position,
    )


def _expert_stays_inside(faults: Faults, axis: str, elsewhere: str | None, position: Position) -> None:
    if elsewhere == "expert":
        faults.fault(
            "SW119",
            position,
            f"roles of '{axis}'",
            "role 'expert' outside 'moe'",
            "a role that has something to shard outside 'moe'",
            f"Write '{axis}: {{elsewhere: fsdp, moe: expert}}'.",
        )


def _flag(faults: Faults, where: str, name: str, node: Located) -> bool:
    assert isinstance(node.value, Mapping)
    option = node.value.get(name)
    if option is not None and not isinstance(option.value, bool):
        found, needed = f"{name} {shown(option.value)}", "true or false"
        faults.fault("SW120", option.position, where, found, needed, f"Write '{name}: true'.")
    return option is not None and option.value is True


def _gathered_together(faults: Faults, entries: Mapping[str, RoleEntry]) -> None:
    """A weight that several axes store is gathered over all of them at once, so all of them keep it or none does."""
    for axis, entry in entries.items():
        for component, role in entry.roles.items():
            others = [
                name
                for name, other in entries.items()
                if ROLES[other.roles[component]].stores and other.weights != "whole" and not other.keep_gathered
            ]
            # In the input there are no weights.
            if entry.keep_gathered and ROLES[role].stores and component != "input" and others:
                assert entry.position is not None
                faults.fault(
                    "SW119",
                    entry.position,
                    f"roles of '{axis}'",
                    f"option 'keep_gathered', which '{others[0]}' does not have: weights of '{component}' are gathered over both at once",
                    "the option on all axes that shard the same weights at rest, or on none",
                    f"Write 'keep_gathered: true' for '{others[0]}' too.",
                )
                break


def unused_options(entry: RoleEntry) -> tuple[str, ...]:
    """The options of an entry that its roles have no use for.

    >>> roles = roles_everywhere({"moe": "expert"}, "fsdp", sequence_parallel=False)
    >>> unused_options(RoleEntry(roles=roles, weights="whole", keep_gathered=True, virtual=2, position=None))
    ('keep_gathered', 'virtual')
    """
    roles = {*entry.roles.values()}
    stores = any(ROLES[role].stores for role in roles)
    # An axis shards the update of weights that it replicates, and of which it sums the gradients.
    replicates = "data" in roles or (stores and entry.weights == "whole")
    used = {
        "keep_gathered": stores and entry.weights != "whole",
        "weights": stores,
        **dict.fromkeys(STAGE_OPTIONS, "stage" in roles),
        "sequence_parallel": entry.roles[SEQUENCE_PARALLEL[0]] == "tensor",
        **dict.fromkeys(UPDATE_OPTIONS, replicates),
    }
    return tuple(name for name, has_use in used.items() if getattr(entry, name) not in (None, False) and not has_use)


NEEDED: Mapping[str, tuple[str, str]] = {
    "keep_gathered": ("that gathers no weights", "role fsdp or context in some component, without 'weights: whole'"),
    "weights": ("that does not shard weights at rest", "role fsdp or context in some component"),
    **dict.fromkeys(STAGE_OPTIONS, ("that is nowhere 'stage'", "role stage where there are layers")),
    "sequence_parallel": ("that is nowhere 'tensor'", "role tensor in some component"),
    **dict.fromkeys(
        UPDATE_OPTIONS,
        (
            "that replicates no weights",
            "role data in some component; other axes shard gradients and the optimizer's tensors as they shard weights",
        ),
    ),
}
"""For each option, the axis that has no use for it, and the role that has."""


def _options_have_a_role(faults: Faults, where: str, node: Located, entry: RoleEntry) -> None:
    unused = unused_options(entry)
    for name in unused:
        axis, needed = NEEDED[name]
        fix = f"Take '{name}' out."
        if name == "sequence_parallel" and "tensor" in entry.roles.values():
            component = SEQUENCE_PARALLEL[0]
            axis = f"that is '{entry.roles[component]}' in '{component}'"
            needed = f"role tensor in '{component}', whose length the option shards"
            fix = f"Write '{component}: tensor', or take 'sequence_parallel' out."
        found = f"option '{name}' on an axis {axis}"
        faults.fault("SW119", node.key_position(name), where, found, needed, fix)
    if entry.gradients is not None and entry.optimizer is None and "gradients" not in unused:
        faults.fault(
            "SW119",
            node.key_position("gradients"),
            where,
            "option 'gradients' without 'optimizer'",
            "both: with a shard of a gradient a device updates a shard of the weight",
            "Write 'optimizer: shard' too.",
        )


def _virtual(faults: Faults, where: str, option: Located | None) -> int | None:
    if option is None:
        return None
    if is_integer(option.value) and option.value >= 1:
        return option.value
    faults.fault(
        "SW120",
        option.position,
        where,
        f"virtual {shown(option.value)}",
        "a number of at least 1: the chunks of layers of each device",
        "Write 'virtual: 2'.",
    )
    return None


def _schedule(faults: Faults, option: Located | None) -> str | None:
    if option is None:
        return None
    if isinstance(option.value, str) and option.value in SCHEDULES:
        return option.value
    faults.unknown(shown(option.value, quote=False), option.position, "option 'schedule'", SCHEDULES, "schedule")
    return None


def _shard(faults: Faults, where: str, name: str, option: Located | None) -> Shard | None:
    if option is None:
        return None
    if option.value == "shard":
        return "shard"
    faults.fault("SW120", option.position, where, f"{name} {shown(option.value)}", "'shard'", f"Write '{name}: shard'.")
    return None


def _stages_hold_whole_layers(faults: Faults, axis: str, where: str, entry: RoleEntry) -> None:
    """A stage with a layer's attention and without its feed-forward layer cannot be run."""
    assert entry.position is not None
    outside = [c for c in ROLES["stage"].components if entry.roles[c] != "stage"]
    if "stage" in entry.roles.values() and outside:
        faults.fault(
            "SW119",
            entry.position,
            where,
            f"role 'stage' in some components of a layer and not in {', '.join(outside)}",
            f"role 'stage' in all of {', '.join(ROLES['stage'].components)}, or in none",
            f"Write '{axis}: stage'.",
        )
    elif "stage" in entry.roles.values() and entry.roles["input"] != "idle":
        faults.fault(
            "SW119",
            entry.position,
            where,
            f"role '{entry.roles['input']}' in 'input' on an axis of stages, each of which reads the rows that it needs",
            "no role in 'input'",
            f"Take 'input: {entry.roles['input']}' out.",
        )


def _role(faults: Faults, node: Located, where: str) -> str | None:
    if isinstance(node.value, str) and node.value in ROLES:
        return node.value
    faults.unknown(shown(node.value, quote=False), node.position, where, tuple(ROLES), "role")
    return None


def _weights(faults: Faults, option: Located | None) -> Weights:
    if option is None or option.value == "whole":
        return None if option is None else "whole"
    items = option.value if isinstance(option.value, tuple) else (option,)
    names: list[str] = []
    for item in items:
        if isinstance(item.value, str) and item.value in LOGICAL_AXES:
            names.append(item.value)
        else:
            faults.unknown(
                shown(item.value, quote=False),
                item.position,
                "option 'weights'",
                ("whole", *LOGICAL_AXES),
                "logical axis",
            )
    return tuple(names)
