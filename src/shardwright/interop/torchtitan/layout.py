"""From degrees to a layout in roles, on a mesh whose devices are TorchTitan's ranks in its order.

| axis | role | in ``moe`` |
|---|---|---|
| pp | stage | stage |
| dp_replicate | data | data |
| dp_shard | fsdp | expert where ep borrows it, else fsdp |
| cp | context | expert where ep borrows it, else context |
| tp | tensor, with sequence parallelism unless that is off | expert where ep borrows it; context where ep leaves some of it, else tensor |

An axis of which ep borrows a part is two: ``tp_mod_ep`` and ``tp_in_ep``. Where tp holds experts the router sees a share of the
tokens, and its weights stay replicas over tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.layout.layout import Layout, MeshEntry, RoleEntry, Rule
from shardwright.core.layout.role_reading import components_of
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.interop.layout_text import entry_of
from shardwright.interop.torchtitan.degrees import Degrees

OUTSIDE = {"pp": "stage", "dp_replicate": "data", "dp_shard": "fsdp", "cp": "context", "tp": "tensor"}
LENT = ("tp", "cp", "dp_shard")
"""The axes that experts borrow from, the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degree:
    """An axis of our mesh: all of one of TorchTitan's, or a part of it. ``holds``: experts lie on it."""

    name: str
    of: str
    size: int
    holds: bool


def parts_of(degrees: Degrees) -> tuple[Degree, ...] | None:
    """The axes larger than 1, and dp_shard, in the order of the ranks.

    None where the ranks of ep are no box of the mesh: 6 of dp_shard 3 x tp 4 are one row of 4 and half of the next.
    """
    left = degrees.ep
    split: dict[str, tuple[int, int]] = {}
    for axis in LENT:
        size = degrees.sizes[axis]
        if left % size == 0:
            split[axis], left = (1, size), left // size
        elif size % left == 0:
            split[axis], left = (size // left, left), 1
        else:
            return None
    if left != 1:
        return None
    parts = []
    for axis, size in degrees.sizes.items():
        outer, inner = split.get(axis, (size, 1))
        if degrees.ep == 1 or inner == 1:
            parts.append(Degree(name=axis, of=axis, size=size, holds=False))
        elif outer == 1:
            parts.append(Degree(name=axis, of=axis, size=size, holds=True))
        else:
            parts.append(Degree(name=f"{axis}_mod_ep", of=axis, size=outer, holds=False))
            parts.append(Degree(name=f"{axis}_in_ep", of=axis, size=inner, holds=True))
    return tuple(part for part in parts if part.size > 1 or part.of == "dp_shard")


def layout_of(degrees: Degrees, parts: tuple[Degree, ...], name: str) -> Layout:
    """The layout; its mesh has the sizes that the degrees say."""
    lends_tensor = any(part.of == "tp" and part.holds for part in parts)
    return Layout(
        name=name,
        about="What TorchTitan's degrees say, on its ranks.",
        mesh={part.name: MeshEntry(size=part.size) for part in parts},
        entries={part.name: _entry(part, degrees, lends_tensor) for part in parts},
        rules=_whole_router(parts) if lends_tensor and degrees.sequence_parallel else (),
    )


def _whole_router(parts: tuple[Degree, ...]) -> tuple[Rule, ...]:
    """Where a part of tp rests experts cut, and all of it is context in the router: the router's weights leave it out."""
    if not any(part.of == "tp" and not part.holds for part in parts):
        return ()
    storing = tuple(part.name for part in parts if part.of in ("dp_shard", "cp"))
    return (Rule(component="router", logical_axis="scores", axes=storing),)


def _entry(part: Degree, degrees: Degrees, lends_tensor: bool) -> RoleEntry:
    outside = OUTSIDE[part.of]
    parallel = part.of == "tp" and degrees.sequence_parallel
    can = components_of(outside, sequence_parallel=parallel)
    roles = {component: outside if component in can else "idle" for component in COMPONENTS}
    if part.of == "tp" and degrees.ep > 1 and (lends_tensor or part.holds):
        roles["router"] = "context" if parallel else "idle"
        roles["moe"] = "context"
    if part.holds:
        roles["moe"] = "expert"
    alone = part.of == "tp" and part.holds and roles["router"] == "context" and part.name == "tp"
    return entry_of(roles, sequence_parallel=parallel, weights="whole" if alone else None)


def mesh_of(parts: tuple[Degree, ...]) -> Mesh:
    return Mesh(tuple(Axis(name=part.name, size=part.size) for part in parts))


def ranks(mesh: Mesh, parts: tuple[Degree, ...], rank: int = 0) -> Mapping[str, tuple[int, ...]]:
    """The ranks that one rank meets in each of TorchTitan's groups."""
    groups = {axis: [part.name for part in parts if part.of == axis] for axis in OUTSIDE}
    groups["batch"] = [*groups["dp_replicate"], *groups["dp_shard"]]
    groups["loss"] = [*groups["batch"], *groups["cp"]]
    groups["ep"] = [part.name for part in parts if part.holds]
    groups["efsdp"] = [part.name for part in parts if part.of in LENT and not part.holds]
    return {name: mesh.group(rank, axes) for name, axes in groups.items()}


def no_box(degrees: Degrees, position: Position | None) -> Finding:
    """The ranks of ep have no place in a mesh of axes."""
    sizes = degrees.sizes
    return Finding(
        code="SW123",
        severity="error",
        where="'expert_parallel_degree'",
        position=position,
        found=f"ep {degrees.ep} takes the innermost ranks of dp_shard {sizes['dp_shard']} x cp {sizes['cp']} x tp {sizes['tp']}, "
        "which are no box of them, so that no axes of a mesh hold the experts",
        needed="a degree that takes whole axes and a divisor of the next",
    )
