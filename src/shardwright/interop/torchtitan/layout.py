"""From degrees to a layout in roles, on a mesh whose devices are TorchTitan's ranks, in the same order.

| axis | role | in ``moe`` |
|---|---|---|
| pp | stage | stage |
| dp_replicate | data | data |
| dp_shard | fsdp | expert where ep borrows it, else fsdp |
| cp | context | expert where ep borrows it, else context |
| tp | tensor, with sequence parallelism unless that is off | expert where ep borrows it; context on a factor of tp that ep does not borrow; else tensor |

An axis that ep borrows only partly becomes two: ``tp_mod_ep`` and ``tp_in_ep``. Where tp shards experts, each rank routes its
own tokens, and the router's weights are replicated over tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.layout.layout import Layout, MeshEntry, RoleEntry, Rule
from shardwright.core.layout.role_reading import components_of
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.interop.layout_text import entry_of
from shardwright.interop.torchtitan.degrees import Degrees
from shardwright.interop.torchtitan.stages import PipelineOptions

ROLES_OUTSIDE_MOE = {"pp": "stage", "dp_replicate": "data", "dp_shard": "fsdp", "cp": "context", "tp": "tensor"}
BORROWED_FROM = ("tp", "cp", "dp_shard")
"""The axes that experts borrow from, the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """An axis of our mesh: a TorchTitan axis, or a factor of one. ``degree``: that axis. ``has_experts``: it shards experts."""

    name: str
    degree: str
    size: int
    has_experts: bool


def mesh_axes_of(degrees: Degrees) -> tuple[MeshAxis, ...] | None:
    """The axes larger than 1, and dp_shard, in the order of the ranks.

    None where the ranks of ep are no box of the mesh: 6 ranks of dp_shard 3 x tp 4 are one row of 4 and half of the next.
    """
    left = degrees.ep
    split: dict[str, tuple[int, int]] = {}
    for axis in BORROWED_FROM:
        size = degrees.sizes[axis]
        if left % size == 0:
            split[axis], left = (1, size), left // size
        elif size % left == 0:
            split[axis], left = (size // left, left), 1
        else:
            return None
    if left != 1:
        return None
    axes = []
    for axis, size in degrees.sizes.items():
        outer, inner = split.get(axis, (size, 1))
        if degrees.ep == 1 or inner == 1:
            axes.append(MeshAxis(name=axis, degree=axis, size=size, has_experts=False))
        elif outer == 1:
            axes.append(MeshAxis(name=axis, degree=axis, size=size, has_experts=True))
        else:
            axes.append(MeshAxis(name=f"{axis}_mod_ep", degree=axis, size=outer, has_experts=False))
            axes.append(MeshAxis(name=f"{axis}_in_ep", degree=axis, size=inner, has_experts=True))
    return tuple(axis for axis in axes if axis.size > 1 or axis.degree == "dp_shard")


def layout_of(degrees: Degrees, axes: tuple[MeshAxis, ...], name: str, stages: PipelineOptions | None = None) -> Layout:
    """The layout; its mesh has the sizes that the degrees give."""
    tp_has_experts = any(axis.degree == "tp" and axis.has_experts for axis in axes)
    return Layout(
        name=name,
        about="TorchTitan's degrees, on its ranks.",
        mesh={axis.name: MeshEntry(size=axis.size) for axis in axes},
        entries={
            axis.name: _staged(_entry(axis, degrees, tp_has_experts), stages if axis.degree == "pp" else None)
            for axis in axes
        },
        rules=_router_rules(axes) if tp_has_experts and degrees.sequence_parallel else (),
    )


def _router_rules(axes: tuple[MeshAxis, ...]) -> tuple[Rule, ...]:
    """Where a factor of tp shards experts at rest, all of tp is context in the router. Then no axis of tp shards the router's weights."""
    if not any(axis.degree == "tp" and not axis.has_experts for axis in axes):
        return ()
    storing = tuple(axis.name for axis in axes if axis.degree in ("dp_shard", "cp"))
    return (Rule(component="router", logical_axis="scores", axes=storing),)


def _entry(axis: MeshAxis, degrees: Degrees, tp_has_experts: bool) -> RoleEntry:
    outside = ROLES_OUTSIDE_MOE[axis.degree]
    parallel = axis.degree == "tp" and degrees.sequence_parallel
    can = components_of(outside, sequence_parallel=parallel)
    roles = {component: outside if component in can else "idle" for component in COMPONENTS}
    if axis.degree == "tp" and degrees.ep > 1 and (tp_has_experts or axis.has_experts):
        roles["router"] = "context" if parallel else "idle"
        roles["moe"] = "context"
    if axis.has_experts:
        roles["moe"] = "expert"
    alone = axis.degree == "tp" and axis.has_experts and roles["router"] == "context" and axis.name == "tp"
    entry = entry_of(roles, sequence_parallel=parallel, weights="whole" if alone else None)
    stores = not alone and any(ROLES[role].stores for role in roles.values())
    return replace(entry, keep_gathered=True) if degrees.keep_gathered and stores else entry


def _staged(entry: RoleEntry, stages: PipelineOptions | None) -> RoleEntry:
    """The entry of the stage axis with its schedule."""
    if stages is None:
        return entry
    return replace(entry, schedule=stages.schedule, virtual=stages.virtual if stages.virtual > 1 else None)


def mesh_of(axes: tuple[MeshAxis, ...]) -> Mesh:
    return Mesh(tuple(Axis(name=axis.name, size=axis.size) for axis in axes))


def rank_groups(mesh: Mesh, axes: tuple[MeshAxis, ...], rank: int = 0) -> Mapping[str, tuple[int, ...]]:
    """The ranks of each of TorchTitan's process groups that contains ``rank``."""
    groups = {degree: [axis.name for axis in axes if axis.degree == degree] for degree in ROLES_OUTSIDE_MOE}
    groups["batch"] = [*groups["dp_replicate"], *groups["dp_shard"]]
    groups["loss"] = [*groups["batch"], *groups["cp"]]
    groups["ep"] = [axis.name for axis in axes if axis.has_experts]
    groups["efsdp"] = [axis.name for axis in axes if axis.degree in BORROWED_FROM and not axis.has_experts]
    return {name: mesh.group(rank, axes) for name, axes in groups.items()}


def ep_is_no_box(degrees: Degrees, position: Position | None) -> Finding:
    """SW123: the ranks of ep are no box of the mesh."""
    sizes = degrees.sizes
    return Finding(
        code="SW123",
        severity="error",
        where="'expert_parallel_degree'",
        position=position,
        found=f"ep {degrees.ep} takes the innermost ranks of dp_shard {sizes['dp_shard']} x cp {sizes['cp']} x tp {sizes['tp']}, "
        "which are no box of the mesh: no mesh axes shard the experts so",
        needed="a degree that takes full axes and a divisor of the next",
    )
