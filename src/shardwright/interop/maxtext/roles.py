"""The layout in roles that a list of rules amounts to on one mesh, as near as the language of roles comes.

For each axis larger than 1 and each component, what the rules cut there says the role:

| activations | weights at rest | role |
|---|---|---|
| rows | some dim | fsdp |
| rows | whole | data |
| tokens of a row | any | context |
| heads, hidden units or vocabulary | the same | tensor; with ``sequence_parallel`` where it cuts the stream's tokens |
| experts | experts | expert |
| rows or tokens, in ``moe``, and nothing cuts experts there | experts | expert, and ``move: {moe: weights}`` |
| any | layers | stage |
| nothing | whole | idle |

Rows of components that have no weights to tell by, ``input`` and ``residual``, follow what the axis is elsewhere.

Where weights then rest otherwise than the rules say, rules of ours and storage dims are tried, as long as one brings more
bytes to where they should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardwright.core.layout.layout import Layout, MeshEntry, RoleEntry, Rule
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.resolution.resolve import resolve_weight
from shardwright.interop.layout_text import entry_of
from shardwright.interop.maxtext.resolution.placing import Imported, Placed

TENSOR_DIMS = ("heads", "kv_heads", "mlp", "vocab")
TRIES = 12
"""How many changes are made at most after the roles; each brings bytes to their place."""


def layout_of(imported: Imported, name: str) -> Layout | None:
    """The layout, on the axes larger than 1; None where the mesh has one device."""
    mesh = smaller_mesh(imported.mesh)
    if mesh is None:
        return None
    entries = {axis: _entry(imported, axis) for axis in mesh.names}
    layout = Layout(
        name=name,
        about=f"What {Path(imported.configuration.sources[-1]).name} says for {imported.table.name}.",
        mesh={axis: MeshEntry(size=mesh.size(axis)) for axis in mesh.names},
        entries=entries,
        move_moe="weights" if _weights_travel(imported) else "all-to-all",
    )
    wanted = {placed.tensor.name: placed for placed in imported.weights}
    lost = _misplaced(imported, layout, mesh, wanted)
    for _ in range(TRIES):
        found = min(
            (
                (_misplaced(imported, each, mesh, wanted), number, each)
                for number, each in enumerate(_nearby(imported, layout))
            ),
            default=(lost, 0, layout),
            key=lambda triple: triple[:2],
        )
        if found[0] >= lost:
            break
        lost, _, layout = found
    return layout


def smaller_mesh(mesh: Mesh) -> Mesh | None:
    """The axes larger than 1."""
    axes = tuple(axis for axis in mesh.axes if axis.size > 1)
    return Mesh(axes) if axes else None


def _weights_travel(imported: Imported) -> bool:
    """Whether experts are cut at rest, and none of them where they compute."""
    hidden = imported.activation("moe.hidden")
    held = any(placed.of("experts") for placed in imported.weights if placed.tensor.component == "moe")
    return hidden is not None and held and not hidden.of("experts")


def _entry(imported: Imported, axis: str) -> RoleEntry:
    roles = {component: _role(imported, axis, component) for component in COMPONENTS}
    if "fsdp" in roles.values():
        roles.update((component, "fsdp") for component in ("input", "residual") if roles[component] == "data")
    parallel = "tensor" in roles.values() and "length" in _cut_by(imported.activations, axis, "residual")
    if parallel:
        roles["residual"] = "tensor"
    # Where the model has nothing, the axis does what it does in most of the others; a stage's is one in all of a layer.
    present = {placed.tensor.component for placed in imported.placed}
    known = [roles[component] for component in COMPONENTS if component in present and roles[component] != "idle"]
    usual = "stage" if "stage" in known else max(dict.fromkeys(known), key=known.count, default="idle")
    for component in COMPONENTS:
        if component not in present:
            roles[component] = usual if component in ROLES[usual].components else "idle"
    return entry_of(roles, sequence_parallel=parallel)


def _role(imported: Imported, axis: str, component: str) -> str:
    weights = _cut_by(imported.weights, axis, component)
    # Tokens reach experts as the router has them where nothing is asked of their layout inside.
    tokens = component if _named_in(imported, component) else "router"
    cuts = _cut_by(imported.activations, axis, tokens)
    stages = "layers" in {dim for placed in imported.weights for dim in _dims_of(placed, axis)}
    if stages and component in ROLES["stage"].components:
        return "stage"
    if component == "moe" and "experts" in weights and ("experts" in cuts or tokens != component):
        return "expert"
    if component == "moe" and "experts" in weights and _weights_travel(imported):
        return "expert"
    if set(TENSOR_DIMS) & set(cuts) or (set(TENSOR_DIMS) & set(weights) and not {"batch", "length"} & set(cuts)):
        return "tensor" if component in ROLES["tensor"].components else "idle"
    if "batch" in cuts:
        return "fsdp" if weights else "data"
    if "length" in cuts:
        return "context"
    if component == "moe" and "length" in _cut_by(imported.activations, axis, "residual") and weights:
        return "context"
    return "idle"


def _named_in(imported: Imported, component: str) -> bool:
    return component != "moe" or imported.activation("moe.hidden") is not None


def _cut_by(tensors: tuple[Placed, ...], axis: str, component: str) -> tuple[str, ...]:
    """Our dims that an axis cuts among the tensors of a component; rows and tokens of keys are left out."""
    found = (
        dim
        for placed in tensors
        if placed.tensor.component == component and not placed.tensor.keys
        for dim in _dims_of(placed, axis)
    )
    return tuple(dict.fromkeys(found))


def _dims_of(placed: Placed, axis: str) -> Iterator[str]:
    for dim, cut in zip(placed.tensor.dims, placed.cuts, strict=True):
        if axis in cut:
            yield dim


def _misplaced(imported: Imported, layout: Layout, mesh: Mesh, wanted: dict[str, Placed]) -> int:
    """Bytes of the weights that rest otherwise than the rules say."""
    lost = 0
    for weight in imported.table.weights:
        placed = wanted[weight.name]
        rests = resolve_weight(weight, layout, mesh, "jax").at_rest
        if any(set(rests.axes_of(dim)) != set(cut) for dim, cut in zip(placed.tensor.dims, placed.cuts, strict=True)):
            lost += placed.tensor.bytes
    return lost


def _nearby(imported: Imported, layout: Layout) -> Iterator[Layout]:
    """The layout with one more rule, or another storage list for one axis."""
    ruled = {(rule.component, rule.logical_axis) for rule in layout.rules}
    cuts: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for placed in imported.weights:
        for dim, cut in zip(placed.tensor.dims, placed.cuts, strict=True):
            if dim not in ("layers", "norm"):
                cuts.setdefault((placed.tensor.component, dim), set()).add(cut)
    for (component, dim), found in cuts.items():
        if (component, dim) not in ruled:
            for axes in sorted(found):
                rule = Rule(component=component, logical_axis=dim, axes=axes)
                yield replace(layout, rules=(*layout.rules, rule))
    for axis, entry in layout.entries.items():
        if entry.weights is None and any(ROLES[role].stores for role in entry.roles.values()):
            dims = dict.fromkeys(d for placed in imported.weights for d in _dims_of(placed, axis))
            for weights in ("whole", *((dim,) for dim in dims if dim != "layers")):
                yield replace(layout, entries={**layout.entries, axis: replace(entry, weights=weights)})
