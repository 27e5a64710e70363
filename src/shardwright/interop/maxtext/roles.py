"""The layout in roles that is nearest to a list of rules on one mesh.

For each axis larger than 1 and each component, the dims that it shards give the role:

| activations | weights at rest | role |
|---|---|---|
| rows | some dim | fsdp |
| rows | replicated | data |
| tokens of a row | any | context |
| heads, hidden units or vocabulary | the same | tensor; with ``sequence_parallel`` where it shards the tokens of the residual stream |
| experts | experts | expert |
| rows or tokens, in ``moe``, where no axis shards experts | experts | expert, and ``move: {moe: weights}`` |
| any | layers | stage |
| none | replicated | idle |

Rows of ``input`` are never sharded over stages. The components ``input`` and ``residual`` have no weights that show a role; there an axis that shards rows has the role that it has
in other components.

Where weights are then not stored as the rules store them, layout rules and storage dims are added as long as one reduces the
misplaced bytes.
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
from shardwright.interop.maxtext.reading.reading import GIVEN
from shardwright.interop.maxtext.resolution.placement import Imported, Placed
from shardwright.interop.maxtext.stages import PipelineSettings

TENSOR_DIMS = ("heads", "kv_heads", "mlp", "vocab")
MAX_CHANGES = 12
"""The most rules and storage dims that are added; each reduces the misplaced bytes."""


def layout_of(imported: Imported, name: str, pipeline: PipelineSettings | None = None) -> Layout | None:
    """The layout, on the axes larger than 1; None where the mesh has one device. ``pipeline``: the settings of its stages."""
    mesh = smaller_mesh(imported.mesh)
    if mesh is None:
        return None
    entries = {axis: _staged(_entry(imported, axis), pipeline) for axis in mesh.names}
    layout = Layout(
        name=name,
        about=_about(imported),
        mesh={axis: MeshEntry(size=mesh.size(axis)) for axis in mesh.names},
        entries=entries,
        move_moe="weights" if _weights_gathered(imported) else "all-to-all",
    )
    placed_by_name = {placed.tensor.name: placed for placed in imported.weights}
    misplaced = _misplaced(imported, layout, mesh, placed_by_name)
    for _ in range(MAX_CHANGES):
        found = min(
            (
                (_misplaced(imported, each, mesh, placed_by_name), number, each)
                for number, each in enumerate(_with_one_change(imported, layout))
            ),
            default=(misplaced, 0, layout),
            key=lambda triple: triple[:2],
        )
        if found[0] >= misplaced:
            break
        misplaced, _, layout = found
    return layout


def _about(imported: Imported) -> str:
    """The file of the rules, whether a command line was merged, and the model."""
    configuration = imported.configuration
    files = [source for source in configuration.sources if source != GIVEN]
    of_rules = None if configuration.rules_from is None else configuration.rules_from.source
    file = files[-1] if of_rules in (None, GIVEN) else of_rules
    given = " and a command line" if GIVEN in configuration.sources else ""
    return f"The rules of {Path(file).name}{given} for {imported.table.name}."


def smaller_mesh(mesh: Mesh) -> Mesh | None:
    """The axes larger than 1."""
    axes = tuple(axis for axis in mesh.axes if axis.size > 1)
    return Mesh(axes) if axes else None


def _weights_gathered(imported: Imported) -> bool:
    """Whether experts are sharded at rest and not in the computation."""
    hidden = imported.activation("moe.hidden")
    held = any(placed.axes_of("experts") for placed in imported.weights if placed.tensor.component == "moe")
    return hidden is not None and held and not hidden.axes_of("experts")


def _entry(imported: Imported, axis: str) -> RoleEntry:
    roles = {component: _role(imported, axis, component) for component in COMPONENTS}
    if "fsdp" in roles.values():
        roles.update((component, "fsdp") for component in ("input", "residual") if roles[component] == "data")
    if "stage" in roles.values():
        # MaxText reads the rows of a stage axis as those of any other; here each stage reads what it needs.
        roles["input"] = "idle"
    parallel = "tensor" in roles.values() and "length" in _dims_sharded_by(imported.activations, axis, "residual")
    if parallel:
        roles["residual"] = "tensor"
    # In components that the model lacks, the axis has its most frequent role; a stage axis has it in all components of a layer.
    present = {placed.tensor.component for placed in imported.placed}
    known = [roles[component] for component in COMPONENTS if component in present and roles[component] != "idle"]
    usual = "stage" if "stage" in known else max(dict.fromkeys(known), key=known.count, default="idle")
    for component in COMPONENTS:
        if component not in present:
            roles[component] = usual if component in ROLES[usual].components else "idle"
    return entry_of(roles, sequence_parallel=parallel)


def _staged(entry: RoleEntry, pipeline: PipelineSettings | None) -> RoleEntry:
    """An entry with the repeats of the pipeline, where it has stages."""
    if pipeline is None or "stage" not in entry.roles.values():
        return entry
    return replace(entry, schedule="circular", virtual=pipeline.repeats if pipeline.repeats > 1 else None)


def _role(imported: Imported, axis: str, component: str) -> str:
    weights = _dims_sharded_by(imported.weights, axis, component)
    # Where no annotation constrains the tokens inside moe, they are sharded as in the router.
    tokens = component if _named_in(imported, component) else "router"
    of_activations = _dims_sharded_by(imported.activations, axis, tokens)
    stages = "layers" in {dim for placed in imported.weights for dim in _dims_of(placed, axis)}
    if stages and component in ROLES["stage"].components:
        return "stage"
    if component == "moe" and "experts" in weights and ("experts" in of_activations or tokens != component):
        return "expert"
    if component == "moe" and "experts" in weights and _weights_gathered(imported):
        return "expert"
    if set(TENSOR_DIMS) & set(of_activations) or (
        set(TENSOR_DIMS) & set(weights) and not {"batch", "length"} & set(of_activations)
    ):
        return "tensor" if component in ROLES["tensor"].components else "idle"
    if "batch" in of_activations:
        return "fsdp" if weights else "data"
    if "length" in of_activations:
        return "context"
    if component == "moe" and "length" in _dims_sharded_by(imported.activations, axis, "residual") and weights:
        return "context"
    return "idle"


def _named_in(imported: Imported, component: str) -> bool:
    return component != "moe" or imported.activation("moe.hidden") is not None


def _dims_sharded_by(tensors: tuple[Placed, ...], axis: str, component: str) -> tuple[str, ...]:
    """Our dims that an axis shards in the tensors of a component, except gathered keys."""
    found = (
        dim
        for placed in tensors
        if placed.tensor.component == component and not placed.tensor.keys
        for dim in _dims_of(placed, axis)
    )
    return tuple(dict.fromkeys(found))


def _dims_of(placed: Placed, axis: str) -> Iterator[str]:
    for dim, axes in zip(placed.tensor.dims, placed.dim_axes, strict=True):
        if axis in axes:
            yield dim


def _misplaced(imported: Imported, layout: Layout, mesh: Mesh, placed_by_name: dict[str, Placed]) -> int:
    """Bytes of the weights that are not stored as the rules store them."""
    misplaced = 0
    for weight in imported.table.weights:
        placed = placed_by_name[weight.name]
        at_rest = resolve_weight(weight, layout, mesh, "jax").at_rest
        if any(
            set(at_rest.axes_of(dim)) != set(axes)
            for dim, axes in zip(placed.tensor.dims, placed.dim_axes, strict=True)
        ):
            misplaced += placed.tensor.bytes
    return misplaced


def _with_one_change(imported: Imported, layout: Layout) -> Iterator[Layout]:
    """The layout with one more rule, or with other storage dims for one axis."""
    ruled = {(rule.component, rule.logical_axis) for rule in layout.rules}
    axes_by_dim: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for placed in imported.weights:
        for dim, axes in zip(placed.tensor.dims, placed.dim_axes, strict=True):
            if dim not in ("layers", "norm"):
                axes_by_dim.setdefault((placed.tensor.component, dim), set()).add(axes)
    for (component, dim), found in axes_by_dim.items():
        if (component, dim) not in ruled:
            for axes in sorted(found):
                rule = Rule(component=component, logical_axis=dim, axes=axes)
                yield replace(layout, rules=(*layout.rules, rule))
    for axis, entry in layout.entries.items():
        if entry.weights is None and any(ROLES[role].stores for role in entry.roles.values()):
            dims = dict.fromkeys(d for placed in imported.weights for d in _dims_of(placed, axis))
            for weights in ("whole", *((dim,) for dim in dims if dim != "layers")):
                yield replace(layout, entries={**layout.entries, axis: replace(entry, weights=weights)})
