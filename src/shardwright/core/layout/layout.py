"""A layout: each mesh axis with exactly one role in each component, and the movement of tokens, keys and weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.findings.position import Position
from shardwright.core.layout.roles import EXCHANGED_FOR_HEADS, ROLES, SEQUENCE_PARALLEL
from shardwright.core.mesh.hashed import HashedOnce

Auto = Literal["auto"]
Shard = Literal["shard"]

ATTENTION_MOVES = ("gather", "ring", "ulysses")
MOE_MOVES = ("all-to-all", "two-hops", "ring", "weights", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshEntry:
    """One axis as the layout declares it: a size, or ``auto`` for the remaining devices."""

    size: int | Auto
    link: str | None = None
    position: Position | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEntry:
    """The roles of one axis, one per component, and its options.

    ``roles`` is complete: components that are not named have the role of `elsewhere`, or ``idle`` where that role
    has nothing to shard. ``declared``: the components that the user named.
    ``weights``: ``whole`` makes an axis of a storing role replicate the weights; a tuple gives the logical axes to try
    before the table's own; None uses the table's. ``keep_gathered``: weights of layers that are gathered over the axis stay gathered
    from the forward to the backward pass. ``virtual``: the chunks of layers that a device of role ``stage`` has;
    ``schedule``: the order in which they compute; None: the schedule's own number, the engine's own schedule.
    ``optimizer``: the axis shards what the optimizer keeps for the weights that it replicates (ZeRO-1); ``gradients``: and their
    gradients too (ZeRO-2).
    """

    roles: Mapping[str, str]
    declared: frozenset[str] = frozenset()
    elsewhere: str | None = None
    weights: Literal["whole"] | tuple[str, ...] | None = None
    keep_gathered: Literal[True] | None = None
    sequence_parallel: bool = False
    optimizer: Shard | None = None
    gradients: Shard | None = None
    virtual: int | None = None
    schedule: str | None = None
    position: Position | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A user's own sharding: the exact axes of one logical axis of the weights of one component."""

    component: str
    logical_axis: str
    axes: tuple[str, ...]
    position: Position | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(HashedOnce):
    """One declaration from which every placement follows. ``mesh`` and ``entries`` have the same axes in one order."""

    name: str
    about: str = ""
    mesh: Mapping[str, MeshEntry]
    entries: Mapping[str, RoleEntry]
    move_attention: str = "gather"
    move_moe: str = "all-to-all"
    rules: tuple[Rule, ...] = ()
    source: str = "<python>"
    pays: str = ""
    """When this layout pays, in one sentence."""
    positions: Mapping[str, Position] = field(default_factory=dict)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(
                self.name, self.move_attention, self.move_moe, len(self.rules), *map(_roles_key, self.entries.items())
            )

    def role(self, axis: str, component: str) -> str:
        """The role of a mesh axis in a component."""
        return self.entries[axis].roles[component]

    def axes_with(self, role: str, component: str) -> tuple[str, ...]:
        """The axes that have a role in a component, in mesh order."""
        return tuple(axis for axis in self.entries if self.role(axis, component) == role)

    def dims_sharded_by(self, axis: str, component: str) -> tuple[str, ...]:
        """The logical axes of activations that ``axis`` shards in ``component``, whichever of them a tensor has.

        Under ``move: {moe: weights}`` tokens do not move: ``moe`` is then sharded as the router is, and where the axis
        shards nothing there, it shards ``groups``.
        """
        role = self.role(axis, component)
        if role == "expert" and self.move_moe == "weights":
            return self.dims_sharded_by(axis, "router") or ("groups",)
        dims = ROLES[role].activations
        if role == "tensor" and self.entries[axis].sequence_parallel and component == SEQUENCE_PARALLEL[0]:
            return (*dims, SEQUENCE_PARALLEL[1])
        return dims

    def dim_sharded_by(self, axis: str, component: str, logical_axes: Sequence[str]) -> str | None:
        """The dim that ``axis`` shards of an activation with these logical axes, if any.

        There are two additions to ``dims_sharded_by``. An axis does not shard KV heads if a rule omits it from the KV
        weights. And under ``ulysses`` the axes of role ``context`` shard heads in place of tokens inside attention.
        They shard KV heads too, unless a rule omits an axis that shards heads from the KV weights: queries and their
        KV heads would then be on different devices.
        """
        dims = self.dims_sharded_by(axis, component)
        attended = component == "attention" and "length" not in logical_axes
        if attended and self.role(axis, component) == "context" and self.move_attention == "ulysses":
            dims = EXCHANGED_FOR_HEADS
        name = next((name for name in dims if name in logical_axes), None)
        if name == "kv_heads":
            with_heads = (axis, *self.axes_sharding("heads", component)) if attended else (axis,)
            if any(self._omitted(other, component, name) for other in with_heads):
                return None
        return name

    def _omitted(self, axis: str, component: str, logical_axis: str) -> bool:
        """Whether a rule omits an axis that shards a logical axis of the weights by its role."""
        by_role = logical_axis in ROLES[self.role(axis, component)].weights
        ruled = [r for r in self.rules if (r.component, r.logical_axis) == (component, logical_axis)]
        return by_role and any(axis not in rule.axes for rule in ruled)

    def keeps_gathered(self, axes: Iterable[str]) -> bool:
        """Whether weights of layers that are gathered over these axes stay gathered from the forward to the backward pass."""
        found = [self.entries[axis].keep_gathered for axis in axes]
        return bool(found) and all(found)

    def axes_sharding(self, logical_axis: str, component: str) -> tuple[str, ...]:
        """The axes that shard a logical axis of activations in a component, in mesh order."""
        return tuple(axis for axis in self.entries if logical_axis in self.dims_sharded_by(axis, component))


def _roles_key(entry: tuple[str, RoleEntry]) -> Hashable:
    """What tells most entries from others."""
    axis, of = entry
    return axis, *of.roles.values(), of.weights, of.keep_gathered, of.optimizer, of.gradients
