"""SW121: what a layout is good for, and the numbers of this plan that decide whether it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.core.checks.edits import entry
from shardwright.core.checks.tensors import device_bytes
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, count, percent
from shardwright.core.plan.plan import Plan


def pays(plan: Plan) -> Iterator[Draft]:
    """One draft for a layout, with a line for each axis larger than 1 and role that it has. It has no fix, and no fix depends on it."""
    layout = plan.request.layout
    lines = [line for axis in plan.mesh.larger_than_one(plan.mesh.names) for line in _lines(plan, axis)]
    if not lines:
        return
    total = sum(c.bytes_per_device * c.count_per_step for c in plan.collectives)
    yield Draft(
        finding=Finding(
            code="SW121",
            severity="info",
            where=f"layout '{layout.name}'",
            position=layout.positions.get("pays") or layout.positions.get("mesh"),
            found="\n".join(lines),
            needed=layout.pays or "a line 'pays: ...' in the layout, written by those who chose it",
            cost=f"{bytes_text(total)} through the collectives of each device in a step",
        )
    )


def _lines(plan: Plan, axis: str) -> Iterator[str]:
    roles = plan.request.layout.entries[axis].roles
    present = plan.request.table.components
    for role in dict.fromkeys(roles[c] for c in sorted(present)):
        if role in FACTS:
            yield f"{axis} {plan.mesh.size(axis)} as {role}: {FACTS[role](plan, axis)}"


def _data(plan: Plan, axis: str) -> str:
    components = {c for c in plan.request.table.components if plan.request.layout.role(axis, c) == "data"}
    held = sum(device_bytes(t) for t in plan.weights if t.component in components)
    names = {t.name for t in plan.weights if t.component in components}
    text = f"{count(plan.mesh.size(axis), 'replica')} of weights of {bytes_text(held)} a device; "
    reduced = _sent(plan, axis, ("all-reduce",), names)
    if not any(t.name in names and axis in t.updated.axes for t in plan.weights):
        return f"{text}{bytes_text(reduced)} of gradients all-reduced once a step"
    scattered, gathered = (_sent(plan, axis, (kind,), names) for kind in ("reduce-scatter", "all-gather"))
    return f"{text}{bytes_text(scattered)} of gradients reduce-scattered and {bytes_text(gathered)} of weights gathered a step"


def _fsdp(plan: Plan, axis: str) -> str:
    names = {t.name for t in plan.weights if plan.request.layout.role(axis, t.component) == "fsdp"}
    tokens = plan.request.batch * plan.request.length // plan.mesh.size(plan.loss_axes)
    moved = _sent(plan, axis, ("all-gather", "reduce-scatter"), names)
    return (
        f"{bytes_text(moved)} of weights gathered and gradients reduce-scattered a step, "
        f"for {count(tokens, 'token')} a device"
    )


def _context(plan: Plan, axis: str) -> str:
    rows = plan.request.batch
    keys = _keys(plan, axis)
    have = plan.mesh.size(plan.dp) * plan.request.microbatches
    what = "queries, keys and values exchanged" if plan.request.layout.move_attention == "ulysses" else "keys moved"
    text = f"{bytes_text(keys)} of {what} a step"
    if rows < have * plan.mesh.size(axis):
        share = percent(1 - rows / (have * plan.mesh.size(axis)))
        return f"{text}; {count(rows, 'row')}: as fsdp it would leave {share} of the devices without a row"
    return text


def _tensor(plan: Plan, axis: str) -> str:
    names = {t.name for t in plan.activations}
    return f"{bytes_text(_sent(plan, axis, None, names))} of activations moved a step"


def _expert(plan: Plan, axis: str) -> str:
    move = plan.request.layout.move_moe
    names = {t.name for t in plan.tensors if t.component in ("moe", "router")}
    held = sum(device_bytes(t) for t in plan.weights if t.component == "moe")
    return f"{bytes_text(_sent(plan, axis, None, names))} moved a step by '{move}', for {bytes_text(held)} of experts a device"


def _stage(plan: Plan, _: str) -> str:
    steps = count(plan.request.microbatches, "microbatch")
    if plan.pipeline is None:
        return steps
    return f"{steps}: {plan.pipeline.idle_text}"


FACTS: dict[str, Callable[[Plan, str], str]] = {
    "data": _data,
    "fsdp": _fsdp,
    "context": _context,
    "tensor": _tensor,
    "expert": _expert,
    "stage": _stage,
}
"""For each role the numbers that decide whether it pays, from the plan's own collectives."""


def _sent(plan: Plan, axis: str, kinds: tuple[str, ...] | None, tensors: set[str]) -> int:
    """Bytes through the collectives of one device over an axis in a step."""
    return sum(
        c.bytes_per_device * c.count_per_step
        for c in plan.collectives
        if axis in c.axes and (kinds is None or c.kind in kinds) and tensors.intersection(c.tensors)
    )


def rows_instead(plan: Plan) -> Iterator[Draft]:
    """Drafts for axes that shard the sequence although there is a row for each device: sharding rows gathers no keys."""
    request = plan.request
    for axis in plan.mesh.larger_than_one(plan.cp):
        declared = request.layout.entries[axis]
        divisor = plan.mesh.size(plan.dp) * request.microbatches * plan.mesh.size(axis)
        if declared.elsewhere != "context" or request.batch % divisor:
            continue
        keys = _keys(plan, axis)
        yield Draft(
            finding=Finding(
                code="SW121",
                severity="info",
                where=f"axis '{axis}' as context",
                position=declared.position,
                found=f"{count(request.batch, 'row')}, which {divisor} would divide if '{axis}' sharded rows: "
                "no device without a row",
                needed=f"fewer than {count(divisor, 'row')}, or rows that are too long for one device",
                cost=f"{bytes_text(keys)} of keys moved a step, which an axis that shards rows does not move",
            ),
            candidates=(entry(plan, axis, elsewhere="fsdp"),),
        )


def _keys(plan: Plan, axis: str) -> int:
    """Bytes of the collectives of keys and values, and under Ulysses of queries, for attention, and of their cotangents."""
    moves = [move for move in plan.request.table.moves if move.kind in ("queries", "keys")]
    return _sent(plan, axis, None, {name for move in moves for name in (move.source, move.target)})
