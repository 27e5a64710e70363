"""SW101 and SW103: weights and activations that an axis of the mesh does not shard."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.codes import Severity
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import REPLICATED_ERROR_SHARE, REPLICATED_WARNING_SHARE
from shardwright.core.layout.wording import bytes_text, every, others, percent, product
from shardwright.interop.maxtext.checks.dispatch import EXPERTS
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy, in_place, without
from shardwright.interop.maxtext.reading.rules import Rule
from shardwright.interop.maxtext.resolution.placement import Imported, Placed

TOKENS = ("batch", "length", "tokens")
TENSOR_DIMS = ("heads", "kv_heads", "mlp", "vocab")
NEEDED = (
    f"less than {percent(REPLICATED_WARNING_SHARE.value)} of the bytes "
    f"(from {percent(REPLICATED_ERROR_SHARE.value)} on it is an error)"
)


def replicated_weights(imported: Imported) -> Iterator[Drafted]:
    """Weights replicated over an axis that shards other weights. An axis that shards none is for replicas, on purpose."""
    mesh = imported.mesh
    total = sum(placed.tensor.bytes for placed in imported.weights)
    stores = [axis for axis in mesh.larger_than_one(mesh.names) if any(axis in p.axes for p in imported.weights)]
    if not stores and mesh.num_devices > 1:
        stores = [axis for axis in mesh.larger_than_one(mesh.names) if axis != "data"]
    groups: dict[tuple[tuple[str, ...], bool], list[Placed]] = {}
    for placed in imported.weights:
        missing = tuple(axis for axis in stores if axis not in placed.axes and axis != "stage")
        if missing:
            groups.setdefault((missing, not placed.axes), []).append(placed)
    for (missing, unsharded), group in groups.items():
        share = sum(placed.tensor.bytes for placed in group) / total
        if share >= REPLICATED_WARNING_SHARE.value:
            severity = "error" if unsharded and share >= REPLICATED_ERROR_SHARE.value else "warning"
            yield Draft(finding=_weights(imported, missing, unsharded, group, total, severity))


def _weights(
    imported: Imported, missing: tuple[str, ...], unsharded: bool, group: list[Placed], total: int, severity: Severity
) -> Finding:
    mesh = imported.mesh
    group = sorted(group, key=lambda placed: -placed.tensor.bytes)
    held = sum(placed.tensor.bytes for placed in group)
    saved = sum(placed.bytes_per_device(mesh) for placed in group) * (1 - 1 / mesh.size(missing))
    return Finding(
        code="SW101",
        severity=severity,
        tensor=group[0].tensor.name,
        where=f"weights over {every(map(repr, missing))}, {group[0].tensor.name} the largest",
        position=_line_of(imported, group[0]),
        notation=group[0].notation,
        mark=(0, len(group[0].notation)),
        found=f"{bytes_text(held, like=total)} of {bytes_text(total)} of weights ({percent(held / total)}) replicated over "
        f"{product(mesh, missing)}, and {'no axis shards them' if unsharded else f'each shard is on {mesh.size(missing)} devices'}"
        f"\n{others([placed.tensor.name for placed in group], 'weight')}",
        needed=NEEDED,
        cost=f"{bytes_text(saved)} a device more than if sharded, before gradients and moments",
    )


def _line_of(imported: Imported, placed: Placed):
    """The position of the first rule that applies to the tensor; that of the list where none does."""
    line = next((line for line in placed.applied if line is not None), None)
    return line.position if line is not None else imported.configuration.rules_from


def replicated_activations(imported: Imported) -> Iterator[Drafted]:
    """Tensors of tokens replicated over an axis that shards the tokens of the residual stream."""
    stream = imported.activation("residual.stream")
    assert stream is not None
    sharding = {axis: dim for dim in TOKENS for axis in stream.axes_of(dim)}
    total = sum(placed.tensor.bytes for placed in imported.activations)
    for placed in imported.activations:
        tensor = placed.tensor
        if tensor.keys or (tensor.component == "moe" and "experts" in tensor.dims[:1]) or tensor.component == "input":
            continue
        missing = tuple(
            axis
            for axis in sharding
            if axis not in placed.axes and not _shards_partial_sums(imported, axis, tensor.component)
        )
        if missing and set(TOKENS) & set(tensor.dims):
            yield Draft(
                finding=_activation(imported, placed, missing, total),
                candidates=tuple(_length_rule(imported, placed, missing, stream)),
            )


def _shards_partial_sums(imported: Imported, axis: str, component: str) -> bool:
    """Whether an axis shards heads, hidden units or vocabulary of a component, so that each device needs all of its tokens."""
    here = ("router", "moe") if component in ("router", "moe") else (component,)
    return any(
        axis in placed.axes_of(dim)
        for placed in imported.placed
        if placed.tensor.component in here
        for dim in TENSOR_DIMS
    )


def _activation(imported: Imported, placed: Placed, missing: tuple[str, ...], total: int) -> Finding:
    mesh, tensor = imported.mesh, placed.tensor
    share = tensor.bytes / total
    dims = [number for number, dim in enumerate(tensor.dims) if dim in TOKENS]
    unruled = [name for n in dims if (name := tensor.names[n]) is not None and placed.applied[n] is None]
    why = f"{every(map(repr, unruled))} {'have' if len(unruled) > 1 else 'has'} no rule" if unruled else ""
    lines = [
        f"'{line.name}' ({line.line}) omits {every(map(repr, missing))}" for n in dims if (line := placed.applied[n])
    ]
    # The inputs of experts are computed from masks, so even small replicated masks cost an all-gather of the tokens.
    least = REPLICATED_WARNING_SHARE if tensor.path else REPLICATED_ERROR_SHARE
    tiled = tensor.name == "logits.tiled"
    used = "; logits are computed so where 'num_vocab_tiling' is above 1" if tiled else ""
    more = bytes_text(placed.bytes_per_device(mesh) / tensor.num * (1 - 1 / mesh.size(missing)))
    return Finding(
        code="SW101",
        severity="error" if share >= least.value and not tiled else "warning",
        tensor=tensor.name,
        where=f"{tensor.name} over {every(map(repr, missing))}",
        position=_line_of(imported, placed),
        notation=placed.notation,
        mark=placed.mark(dims[-1]),
        found=f"{product(mesh, missing)} {_shard(missing)} the tokens of the residual stream and no dim here: "
        f"{'; '.join(filter(None, (why, *lines)))}{used}",
        needed=f"{every(map(repr, missing))} on a dim of {tensor.name}",
        cost=f"computed {mesh.size(missing)} times, after an all-gather of its inputs: {percent(share)} of the activations' bytes, "
        f"in a layer {more} a device more than if sharded",
    )


def _shard(axes: tuple[str, ...]) -> str:
    return "shards" if len(axes) == 1 else "shard"


def _length_rule(imported: Imported, placed: Placed, missing: tuple[str, ...], stream: Placed) -> Iterator[Remedy]:
    """A rule for the length, where the axes shard the length of the stream; else more axes for the rows, the experts' rule first."""
    names = dict(zip(placed.tensor.dims, placed.tensor.names, strict=True))
    length, rows = names.get("length"), names.get("batch") or names.get("tokens")
    if length and set(missing) <= set(stream.axes_of("length")):
        line = Rule(name=length, axes=missing)
        yield Candidate(text=f"Write '{line}'.", edit=lambda i: i.under(in_place(i.rules, str(line.name), line)))
    lines = [line for line in imported.rules if line.name == rows]
    if rows and lines:
        wide = Rule(name=rows, axes=(*lines[0].axes, *missing), position=lines[0].position)
        yield Candidate(
            text=f"Write '{wide}' in place of line {lines[0].position.line}.",
            edit=lambda i: i.under(in_place(i.rules, wide.name, wide)),
        )
        experts = [line for line in imported.rules if line.name == EXPERTS]
        if experts:
            yield Candidate(
                text=f"Write '{experts[0]}' and '{wide}' above line {lines[0].position.line}.",
                edit=lambda i: i.under(in_place(without(i.rules, EXPERTS), wide.name, *experts, wide, *lines)),
            )


def idle_in_experts(imported: Imported) -> Iterator[Drafted]:
    """Axes that shard the tokens of the residual stream and nothing in the experts, whose products are then repeated."""
    stream, hidden = imported.activation("residual.stream"), imported.activation("moe.hidden")
    if stream is None or hidden is None:
        return
    idle = tuple(axis for dim in TOKENS for axis in stream.axes_of(dim) if axis not in hidden.axes)
    if idle:
        yield Draft(
            finding=Finding(
                code="SW103",
                severity="error",
                tensor=hidden.tensor.name,
                where=f"{every(map(repr, idle))} in the experts",
                position=_line_of(imported, hidden),
                notation=hidden.notation,
                mark=(0, len(hidden.notation)),
                found=f"{product(imported.mesh, idle)} {_shard(idle)} no dim of the tokens that experts compute on",
                needed=f"{every(map(repr, idle))} on a dim of {hidden.tensor.name}",
                cost=f"each product of the experts is computed {imported.mesh.size(idle)} times",
            )
        )
