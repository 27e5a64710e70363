"""Resolution: from a layout to the spec of each tensor, with a record of every axis that is requested, granted or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.roles import EXCHANGED_FOR_HEADS, ROLES
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.capacity import Traffic, row_capacity
from shardwright.core.model.table import ModelTable, Weight, as_torch_stores
from shardwright.core.resolution.order import ordered, persistent_axes
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.storage import StorageChoice, choose_storage

Refusal = Literal["left-out", "kept-whole", "taken", "none-divides", "no-list"]
"""Why an axis that is requested to shard a weight does not: a rule leaves it out; its entry has ``weights: whole``; it
shards another dim of the weight already; it divides no dim of the storage list; the table gives no storage list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRequest:
    """One axis that a layout requests to shard a tensor: the dim it is ``granted``, or why it is ``refused``."""

    axis: str
    role: str
    tried: tuple[str, ...]
    granted: str | None = None
    refused: Refusal | None = None

    def __post_init__(self) -> None:
        assert (self.granted is None) != (self.refused is None), self


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedWeight:
    """A weight's specs at rest and in use, and the result for each requested axis."""

    weight: Weight
    at_rest: Spec
    in_use: Spec
    axis_requests: tuple[AxisRequest, ...]


def as_stored(request: Request, weight: Weight) -> Weight:
    """A weight in the dims of the request's engine. A weight whose codes are gathered with those of its group is stored on its dim 0
    alone."""
    engine, recipe = request.properties, request.precision
    stored = as_torch_stores(weight) if engine.merges_dims else weight
    of_codes = engine.gathers_together and recipe is not None and recipe.of_codes
    return replace(stored, storage=stored.storage[:1]) if of_codes else stored


def resolve_weight(
    weight: Weight, layout: Layout, mesh: Mesh, engine: Engine, component: str | None = None
) -> ResolvedWeight:
    """The specs of one layer of a weight; its dims are the engine's (``as_stored``).

    ``component``: the component that uses the weight, for the second use of a tied one; None: its own.

    A pipeline stage shards the stack of layers, which is then the first dim, as ``layers/stage``.
    """
    component = component or weight.component
    # The sizes of axes decide only which dims the storage axes divide.
    begun = _before_storage(weight, layout, mesh.outline, engine, component)
    choices = choose_storage(weight, layout, mesh, engine, begun.storage_axes, begun.axes_of)
    return _with_storage(weight, layout, mesh.outline, engine, component, choices)


class _Begun(NamedTuple):
    """A weight's axes, but for those that choose a dim to store it: ``storage_axes``."""

    persistent: Mapping[str, Sequence[str]]
    gathered: Mapping[str, Sequence[str]]
    requests: Sequence[AxisRequest]
    storage_axes: Sequence[str]
    axes_of: Mapping[str, Sequence[str]]


@lru_cache(maxsize=4096)
def _before_storage(weight: Weight, layout: Layout, mesh: Mesh, engine: Engine, component: str) -> _Begun:
    requests: list[AxisRequest] = []
    rules = {r.logical_axis: r.axes for r in layout.rules if r.component == component}
    ruled = {name: axes for name, axes in rules.items() if name in weight.logical_axes}
    persistent: dict[str, list[str]] = {name: [] for name in (*weight.logical_axes, "layers")}
    gathered: dict[str, list[str]] = {name: [] for name in weight.logical_axes}
    storage_axes: list[str] = []
    for axis in mesh.names:
        role = ROLES[layout.role(axis, component)]
        wanted = tuple(n for n in role.weights if n in weight.logical_axes or (n == "layers" and weight.stack))
        if wanted:
            name = wanted[0]
            if name in ruled and axis not in ruled[name]:
                requests.append(AxisRequest(axis=axis, role=role.name, tried=wanted, refused="left-out"))
                continue
            gathers_experts = role.name == "expert" and layout.move_moe == "weights"
            (gathered if gathers_experts else persistent)[name].append(axis)
            requests.append(AxisRequest(axis=axis, role=role.name, tried=wanted, granted=name))
        elif role.stores and layout.entries[axis].weights != "whole":
            storage_axes.append(axis)
        elif role.stores:
            requests.append(AxisRequest(axis=axis, role=role.name, tried=(), refused="kept-whole"))
    if ruled:
        # Where frozen weights are not gathered, they have the same spec at rest and in use.
        gathers = ENGINES[engine].gathers_frozen or not weight.frozen
        storage_axes = _apply_rules(ruled, layout, component, gathers, storage_axes, persistent, gathered, requests)
    already = {name: persistent.get(name, []) + gathered[name] for name in weight.logical_axes}
    return _Begun(persistent, gathered, requests, storage_axes, already)


@lru_cache(maxsize=4096)
def _with_storage(
    weight: Weight, layout: Layout, mesh: Mesh, engine: Engine, component: str, choices: tuple[StorageChoice, ...]
) -> ResolvedWeight:
    begun = _before_storage(weight, layout, mesh, engine, component)
    persistent, requests = begun.persistent, [*begun.requests]
    gathered = {name: [*axes] for name, axes in begun.gathered.items()}
    for choice in choices:
        if choice.granted:
            gathered[choice.granted].extend(choice.axes)
        requests += [
            AxisRequest(
                axis=a,
                role=layout.role(a, component),
                tried=choice.tried,
                granted=choice.granted,
                refused=choice.refused,
            )
            for a in choice.axes
        ]
    at_rest = Spec.build(
        weight.logical_axes, {n: ordered(mesh, persistent[n], gathered[n]) for n in weight.logical_axes}
    )
    in_use = Spec.build(weight.logical_axes, {n: ordered(mesh, persistent[n], ()) for n in weight.logical_axes})
    if persistent["layers"]:
        at_rest, in_use = (
            at_rest.prefixed("layers", persistent["layers"]),
            in_use.prefixed("layers", persistent["layers"]),
        )
    return ResolvedWeight(weight=weight, at_rest=at_rest, in_use=in_use, axis_requests=tuple(requests))


def _apply_rules(
    ruled: Mapping[str, tuple[str, ...]],
    layout: Layout,
    component: str,
    gathers: bool,
    storage_axes: list[str],
    persistent: dict[str, list[str]],
    gathered: dict[str, list[str]],
    requests: list[AxisRequest],
) -> list[str]:
    """Give the ruled dims exactly their axes. The weight is replicated over a storage axis that no rule names.

    ``gathers``: whether an axis that only a rule puts on a dim can be gathered for use.
    """
    placed: dict[str, str] = {
        axis: name for group in (persistent, gathered) for name, axes in group.items() for axis in axes
    }
    for name, axes in ruled.items():
        for axis in axes:
            # A second dim for one axis is ignored here and reported as SW102.
            if axis not in placed and not gathers:
                requests.append(
                    AxisRequest(axis=axis, role=layout.role(axis, component), tried=(name,), refused="no-list")
                )
            elif axis not in placed:
                placed[axis] = name
                gathered[name].append(axis)
                requests.append(AxisRequest(axis=axis, role=layout.role(axis, component), tried=(name,), granted=name))
            elif placed[axis] != name:
                requests.append(
                    AxisRequest(axis=axis, role=layout.role(axis, component), tried=(name,), refused="taken")
                )
    left = [axis for axis in storage_axes if axis not in placed]
    requests += [
        AxisRequest(axis=axis, role=layout.role(axis, component), tried=(), refused="left-out") for axis in left
    ]
    return []


def operand_spec(in_use: Spec, component: str, layout: Layout, mesh: Mesh) -> Spec:
    """The spec of what a device multiplies with, of one layer of a weight: the spec in use, and in addition the axes that
    shard a dim of the activations and that a rule leaves out of the weight. Over these a device takes its slice."""
    return _operand_spec(in_use, component, layout, mesh.outline)


@lru_cache(maxsize=8192)
def _operand_spec(in_use: Spec, component: str, layout: Layout, mesh: Mesh) -> Spec:
    axes_of = {dim.logical_axis: list(dim.axes) for dim in in_use.dims}
    for axis in mesh.names:
        # A rule that leaves an axis out of the KV heads' weights replicates the KV heads too: ``dim_sharded_by`` knows it.
        name = layout.dim_sharded_by(axis, component, ("batch", "length", *in_use.logical_axes))
        if name in axes_of and axis not in in_use.axes:
            axes_of[name].append(axis)
    return Spec.build(in_use.logical_axes, axes_of)


def resolve_activation(
    component: str, logical_axes: tuple[str, ...], layout: Layout, mesh: Mesh, components: frozenset[str]
) -> Spec:
    """The spec of an activation with these logical axes. ``components``: those of the model, which decide the persistent axes."""
    # It depends on no size of an axis.
    return _resolve_activation(component, logical_axes, layout, mesh.outline, components)


@lru_cache(maxsize=8192)
def _resolve_activation(
    component: str, logical_axes: tuple[str, ...], layout: Layout, mesh: Mesh, components: frozenset[str]
) -> Spec:
    axes_of: dict[str, list[str]] = {name: [] for name in logical_axes}
    for axis in mesh.names:
        dispatched_from = component == "router" and "groups" in axes_of
        name = dispatched_dim(layout, axis) if dispatched_from else layout.dim_sharded_by(axis, component, logical_axes)
        if name is not None:
            axes_of[name].append(axis)
    for name in EXCHANGED_FOR_HEADS:
        # Axes that shard heads in exchange for tokens shard tokens again after attention. They come after the persistent
        # axes, in the order in which they shard the tokens.
        exchanged = [axis for axis in axes_of.get(name, ()) if layout.role(axis, component) == "context"]
        if exchanged:
            persistent = [axis for axis in axes_of[name] if axis not in exchanged]
            axes_of[name] = [*persistent, *order_on("length", exchanged, layout, mesh, components)]
    return Spec.build(logical_axes, {n: order_on(n, axes, layout, mesh, components) for n, axes in axes_of.items()})


def order_on(name: str, axes: list[str], layout: Layout, mesh: Mesh, components: frozenset[str]) -> tuple[str, ...]:
    """The axes of one dim of an activation, major first."""
    if name in EXCHANGED_FOR_HEADS:
        return tuple(axes)
    if name not in ("batch", "length", "q_length", "groups"):
        return ordered(mesh, axes, ())
    if name == "groups":
        # Axes that already shard the row come first, so that no tokens have to be sent.
        outside = order_on(
            "length", [a for a in axes if "length" in layout.dims_sharded_by(a, "router")], layout, mesh, components
        )
        return (*outside, *ordered(mesh, [a for a in axes if a not in outside], ()))
    persistent = persistent_axes(layout, name, components)
    return ordered(mesh, [a for a in axes if a in persistent], [a for a in axes if a not in persistent])


def dispatched_dim(layout: Layout, axis: str) -> str | None:
    """The dim of tokens that an axis shards before their dispatch, ``batch`` or ``groups``: no axis that has a role in
    ``moe`` repeats the experts' products.

    | role in ``moe`` | dim |
    |---|---|
    | expert, and the axis shards batch in the router | batch |
    | expert, and the axis shards length in the router | groups: the chunks of a row |
    | expert, and tokens are replicated in the router | groups: each device takes its share |
    | any other | the one that ``moe`` shards |
    """
    if layout.role(axis, "moe") == "expert" and layout.move_moe != "weights":
        return "batch" if "batch" in layout.dims_sharded_by(axis, "router") else "groups"
    return next((name for name in layout.dims_sharded_by(axis, "moe") if name in ("batch", "groups")), None)


def expert_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which tokens are sent to experts, directly or around a ring; none where the weights are gathered."""
    return () if layout.move_moe == "weights" else mesh.larger_than_one(layout.axes_with("expert", "moe"))


def activation_sizes(request: Request, mesh: Mesh) -> Mapping[str, int]:
    """Elements along every logical axis: the table's, the request's, and those of dispatched tokens.

    ``groups`` is the number of chunks of a row at the dispatch, each of ``tokens`` tokens. ``slots`` are the rows of a
    device's buffer for each expert, row and group of that device.
    """
    length = request.length
    sizes = {
        **request.table.sizes,
        "batch": request.batch,
        **dict.fromkeys(("length", "q_length", "kv_length"), length),
    }
    if "experts" in sizes:
        groups = mesh.size(_axes_that_dispatch(request.layout, mesh, "groups"))
        sizes["groups"], sizes["tokens"] = groups, ceil(length / groups)
        traffic = traffic_of(request, mesh)
        axes_sharding = request.layout.axes_sharding
        rows = ceil(request.batch / request.microbatches / mesh.size(axes_sharding("batch", "moe")))
        held = traffic.experts * rows * ceil(groups / mesh.size(axes_sharding("groups", "moe")))
        sizes["slots"] = ceil(traffic.buffer_rows(request.expert_buffer) / held)
    return sizes


def traffic_of(request: Request, mesh: Mesh) -> Traffic:
    """What a device sends to experts and can receive, in one layer and microbatch."""
    table, layout = request.table, request.layout
    axes = expert_axes(layout, mesh)
    row = _axes_that_dispatch(layout, mesh, "groups")
    rows = request.batch / request.microbatches / mesh.size(_axes_that_dispatch(layout, mesh, "batch"))
    devices = mesh.size(axes)
    return Traffic(
        devices=devices,
        experts=ceil(table.sizes["experts"] / devices),
        rows=ceil(rows),
        tokens=ceil(request.length / mesh.size(row)),
        row_shards=mesh.size(axis for axis in axes if axis in row),
        top_k=table.top_k or table.sizes["experts"],
        capacity=capacity_of(table, request.length),
    )


def _axes_that_dispatch(layout: Layout, mesh: Mesh, name: str) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.names if dispatched_dim(layout, axis) == name)


def capacity_of(table: ModelTable, length: int) -> int | None:
    """The capacity of one expert: the most tokens of one row that it takes. None where no token is dropped, or where a
    user's own table does not give the number of experts of a token."""
    if table.top_k is None:
        return None
    return row_capacity(table.capacity_factor, top_k=table.top_k, experts=table.sizes["experts"], length=length)
