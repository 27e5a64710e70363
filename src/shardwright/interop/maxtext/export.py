"""A layout of ours as a list of MaxText's rules, which store every weight of a model as the plan does.

A name has one rule, unless tensors shard it differently. Then it has several: where another name's axes block the first in a
tensor, the next one applies. The list is resolved again and compared with the plan before it is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from shardwright.core.findings.codes import Severity
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, counted, others, product
from shardwright.core.plan.plan import Plan
from shardwright.interop.maxtext.policy import policy_lines
from shardwright.interop.maxtext.reading.rules import Rule, rule
from shardwright.interop.maxtext.reading.sizes import size_key
from shardwright.interop.maxtext.reading.vocabulary import AXES, CONTEXT, CONTEXT_AXES
from shardwright.interop.maxtext.resolution.flax_resolution import resolve
from shardwright.interop.maxtext.resolution.tensors import AnnotatedTensor, StepShape, tensors_of
from shardwright.interop.maxtext.stages import settings_lines, unlike

AXIS_OF_ROLE = {
    "data": "data",
    "fsdp": "fsdp",
    "context": "context",
    "tensor": "tensor",
    "expert": "expert",
    "stage": "stage",
}
"""MaxText's axis name for each role, to suggest a new name for an axis."""

MAX_LINES = 4
"""The most rules of one name that are tried in every order."""

DimAxes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor with MaxText's names, and the plan's axes of each dim. ``lost``: axes of the plan for which it has no dim."""

    tensor: AnnotatedTensor
    dim_axes: DimAxes
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The rules, the text of their file, and findings on what they cannot express."""

    plan: Plan
    rules: tuple[Rule, ...]
    text: str
    compared: int
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "layout": self.plan.request.layout.name,
            "model": self.plan.request.table.name,
            "mesh": dict(self.plan.mesh.shape),
            "rules": [{"name": line.name, "axes": list(line.axes)} for line in self.rules],
            "text": self.text,
            "compared": self.compared,
            "findings": [finding.to_json() for finding in self.findings],
        }


def export_maxtext(plan: Plan) -> Export:
    """The rules of a plan.

    Raises InputError for a mesh axis that MaxText has no size for, for a schedule of stages, for updates that an axis shards, for a policy of recomputation that it cannot say, and for a model with a weight that MaxText
    lacks.
    """
    _axes_are_known(plan)
    settings = [*settings_lines(plan), *policy_lines(plan.request.remat, plan.request.table)]
    _updates_are_plain(plan)
    planned = _planned_tensors(plan)
    rules = _rules(planned, tuple(_also(plan)))
    differences = [
        (each, found) for each in planned if (found := resolve(each.tensor.names, rules).axes) != each.dim_axes
    ]
    return Export(
        plan=plan,
        rules=rules,
        text=rules_text(plan, rules, settings),
        compared=len(planned),
        findings=tuple(_findings(plan, planned, differences)),
    )


def rules_text(plan: Plan, rules: Sequence[Rule], settings: Sequence[str] = ()) -> str:
    """A file that is both a preset and a configuration: mesh, sizes, settings of a pipeline, data and rules, one line each."""
    mesh, layout = plan.mesh, plan.request.layout
    axes = ", ".join(mesh.names)
    of_length = next((line.axes for line in rules if line.name == "activation_length"), ())
    counted_by = of_length[0] if of_length else CONTEXT_AXES[0]
    lines = [
        f"# Layout '{layout.name}' for {plan.request.table.name}, written by shardwright. A name may have several rules:",
        "# where an axis of the first is taken in a tensor, the next one applies. Their order matters.",
        f"mesh_axes: [{axes}]",
        f"data_sharding: [[{axes}]]",
        *(f"{size_key('ici', axis.name)}: {axis.size}" for axis in mesh.axes),
        *settings,
        *([f"{CONTEXT}: {counted_by}"] if counted_by != CONTEXT_AXES[0] and counted_by in CONTEXT_AXES else []),
        "logical_axis_rules:",
        *(f"  - {line}" for line in rules),
    ]
    return "\n".join(lines) + "\n"


def _axes_are_known(plan: Plan) -> None:
    layout = plan.request.layout
    for axis in plan.mesh.names:
        if axis not in AXES:
            roles = layout.entries[axis].roles
            usual = max(dict.fromkeys(roles.values()), key=list(roles.values()).count)
            near = AXIS_OF_ROLE.get(layout.entries[axis].elsewhere or usual)
            hint = f" MaxText's name for an axis that is mostly '{usual}' is '{near}'." if near else ""
            raise InputError(f"MaxText has no mesh axis '{axis}'. Known: {', '.join(AXES)}.{hint}")


def _updates_are_plain(plan: Plan) -> None:
    """Raises InputError for updates that an axis shards, and for weights that stay gathered: rules are of weights and activations."""
    for axis, entry in plan.request.layout.entries.items():
        if entry.keep_gathered:
            raise InputError(
                f"layout '{plan.request.layout.name}': 'keep_gathered' of axis '{axis}' cannot be written as rules: MaxText gathers "
                f"weights of layers again where it recomputes them. Take it out."
            )
        if entry.optimizer is not None:
            raise InputError(
                f"layout '{plan.request.layout.name}': 'optimizer' of axis '{axis}' cannot be written as rules. Take it out, and set "
                f"shard_optimizer_over_data of MaxText."
            )


def _planned_tensors(plan: Plan) -> list[PlannedTensor]:
    request = plan.request
    stages = any(plan.mesh.size(a) > 1 for a in request.layout.axes_with("stage", "attention"))
    step = StepShape(batch=request.batch, length=request.length, path="capacity", pipelined=stages)
    found = []
    for tensor in tensors_of(request.table, step):
        planned = _as_planned(plan, tensor)
        if planned is not None:
            dim_axes = tuple(planned.get(dim, ()) for dim in tensor.dims)
            expressed = {axis for axes in dim_axes for axis in axes}
            lost = tuple(axis for axes in planned.values() for axis in axes if axis not in expressed)
            found.append(PlannedTensor(tensor=tensor, dim_axes=dim_axes, lost=plan.mesh.larger_than_one(lost)))
    return found


def _as_planned(plan: Plan, tensor: AnnotatedTensor) -> Mapping[str, tuple[str, ...]] | None:
    """The plan's axes of each of our dims; a tensor that only MaxText has takes those of our nearest one."""
    like = tensor.ours or {
        "moe.masks": "router.scores",
        "logits.tiled": "logits.scores",
        "attention.keys": "attention.queries",
    }.get(tensor.name)
    row = None if like is None else plan.by_name.get(like)
    if row is None:
        return None
    planned = {"length" if dim.logical_axis == "q_length" else dim.logical_axis: dim.axes for dim in row.spec.dims}
    if tensor.name == "logits.tiled":
        planned["tokens"] = (*planned.pop("batch"), *planned.pop("length"))
    return planned


def _rules(planned: Sequence[PlannedTensor], also: Sequence[Rule]) -> tuple[Rule, ...]:
    """Names that all tensors shard the same, in any order; then the others, each in the order of rules that misplaces the fewest bytes."""
    shardings: dict[str, list[tuple[str, ...]]] = {}
    for each in planned:
        for name, axes in zip(each.tensor.names, each.dim_axes, strict=True):
            if name is not None and axes not in shardings.setdefault(name, []):
                shardings[name].append(axes)
    rules = [rule(name, *variants[0]) for name, variants in shardings.items() if len(variants) == 1]
    for name, variants in shardings.items():
        if len(variants) > 1:
            orders = permutations(variants) if len(variants) <= MAX_LINES else [tuple(variants)]
            candidates = [[*rules, *(rule(name, *axes) for axes in order)] for order in orders]
            losses = [_misplaced_bytes(planned, name, lines) for lines in candidates]
            rules = candidates[losses.index(min(losses))]
    return tuple(_without_unreached([*rules, *also]))


def _also(plan: Plan) -> Iterator[Rule]:
    """Rules for names that no tensor here has and that MaxText also reads: queries, sparse experts, stages."""
    segments = plan.by_name["attention.q_segments"].in_use
    yield rule("activation_q_length", *segments.axes_of("q_length"))
    experts = next((row for row in plan.weights if row.name.endswith(".moe.up")), None)
    if experts is not None:
        yield rule("mlp_no_fsdp", *experts.in_use.axes_of("mlp"))
    stages = plan.request.layout.axes_with("stage", "attention")
    if stages:
        yield rule("activation_stage", *stages)


def _misplaced_bytes(planned: Sequence[PlannedTensor], name: str, rules: Sequence[Rule]) -> tuple[int, int]:
    """Bytes of weights, then of activations, whose dim of this name is not sharded as in the plan."""
    lost = {"weight": 0, "activation": 0}
    for each in planned:
        if name in each.tensor.names:
            dim = each.tensor.names.index(name)
            if resolve(each.tensor.names, rules).axes[dim] != each.dim_axes[dim]:
                lost[each.tensor.kind] += each.tensor.bytes
    return lost["weight"], lost["activation"]


def _without_unreached(rules: Sequence[Rule]) -> Iterator[Rule]:
    """The list without rules that an earlier rule of the same name always precedes."""
    for number, line in enumerate(rules):
        earlier = (old for old in rules[:number] if old.name == line.name)
        if not any(set(old.axes) <= set(line.axes) for old in earlier):
            yield line


def _findings(
    plan: Plan, planned: Sequence[PlannedTensor], differences: Sequence[tuple[PlannedTensor, DimAxes]]
) -> Iterator[Finding]:
    layout = plan.request.layout
    severities: dict[str, Severity] = {"weight": "error", "activation": "info"}
    for kind, severity in severities.items():
        those = [(each, found) for each, found in differences if each.tensor.kind == kind]
        if those:
            lines = "\n".join(
                f"{each.tensor.name}: {_text(each.tensor, each.dim_axes)} by the layout, {_text(each.tensor, found)} by the rules"
                for each, found in those
            )
            yield Finding(
                code="SW123",
                severity=severity,
                tensor=those[0][0].tensor.name,
                where=f"layout '{layout.name}' in rules for {plan.request.table.name}",
                found=f"{count(len(those), kind)} for which a name would need two different shardings "
                f"({others([each.tensor.name for each, _ in those], kind)})\n{lines}",
                needed="names that all tensors shard the same, or differently where another dim takes an axis of the first rule",
            )
    yield from _indivisible(plan, planned)
    for found, needed in unlike(plan):
        where = f"stages of layout '{layout.name}'"
        yield Finding(code="SW123", severity="info", where=where, found=found, needed=needed)
    lost = [each for each in planned if each.lost]
    if lost:
        axes = dict.fromkeys(axis for each in lost for axis in each.lost)
        yield Finding(
            code="SW123",
            severity="info",
            tensor=lost[0].tensor.name,
            where=f"layout '{layout.name}' in rules for {plan.request.table.name}",
            found=f"{others([each.tensor.name for each in lost], 'activation')}: no dim for {', '.join(map(repr, axes))}, "
            "which shards the groups of a row in our dispatched tokens",
            needed="a dim for the groups of a row",
        )


def _indivisible(plan: Plan, planned: Sequence[PlannedTensor]) -> Iterator[Finding]:
    """Dims of weights that the plan pads, or shards unevenly: MaxText does neither."""
    cases = [
        (each.tensor, dim, size, axes)
        for each in planned
        if each.tensor.kind == "weight"
        for dim, size, axes in zip(each.tensor.dims, each.tensor.shape, each.dim_axes, strict=True)
        # Layers that the stages do not divide are outside of the pipeline.
        if dim != "layers" and size % plan.mesh.size(axes)
    ]
    for dim, size, axes in dict.fromkeys((dim, size, axes) for _, dim, size, axes in cases):
        names = [tensor.name for tensor, *rest in cases if rest == [dim, size, axes]]
        yield Finding(
            code="SW123",
            severity="error",
            tensor=names[0],
            where=f"layout '{plan.request.layout.name}' in rules for {plan.request.table.name}",
            found=f"{counted(size, dim)} over {product(plan.mesh, axes)}, which the plan pads or shards unevenly: MaxText ends with an "
            f"error, or shards them over fewer axes ({others(names, 'weight')})",
            needed=f"axes whose product divides {size}",
        )


def _text(tensor: AnnotatedTensor, dim_axes: DimAxes) -> str:
    names = (name or f"_{dim}" for name, dim in zip(tensor.names, tensor.dims, strict=True))
    return " ".join("/".join((name, *axes)) for name, axes in zip(names, dim_axes, strict=True))
