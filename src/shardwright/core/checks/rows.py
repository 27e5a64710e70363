"""SW108: rows over the axes that shard the batch, tokens over those that shard the length."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardwright.core.checks.edits import entry, option
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, either, percent, product
from shardwright.core.mesh.divisors import divisors, nearest_multiples
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan, TensorPlan


def rows_and_tokens(plan: Plan) -> Iterator[Draft]:
    """Each set of axes that shards batch or length of some activation and does not divide it, except subsets of others."""
    for name in ("batch", "length"):
        groups: dict[tuple[str, ...], TensorPlan] = {}
        for tensor in plan.activations:
            axes = plan.mesh.larger_than_one(tensor.in_use.axes_of(name))
            if name in tensor.in_use.logical_axes and not _divides(plan, name, axes):
                groups.setdefault(axes, tensor)
        reported: list[set[str]] = []
        for axes, tensor in sorted(groups.items(), key=lambda item: -plan.mesh.size(item[0])):
            if not any(set(axes) <= larger for larger in reported):
                reported.append(set(axes))
                yield _draft(plan, name, axes, tensor)


def rows_to_divide(plan: Plan) -> int:
    """The rows of a microbatch on a device, among which further microbatches or devices are possible; 0 where these have no equal numbers."""
    sharded_by = {plan.mesh.larger_than_one(row.in_use.axes_of("batch")) for row in plan.activations}
    chunks = [_divisor(plan, "batch", axes) for axes in sharded_by]
    rows = plan.sizes["batch"]
    return 0 if any(rows % number for number in chunks) else gcd(*(rows // number for number in chunks))


def _divisor(plan: Plan, name: str, axes: tuple[str, ...]) -> int:
    if name == "batch":
        return plan.mesh.size(axes) * plan.request.microbatches
    balanced = not plan.rows_in_order and set(axes) & set(plan.cp)
    return plan.mesh.size(axes) * (2 if balanced else 1)


def _divides(plan: Plan, name: str, axes: tuple[str, ...]) -> bool:
    have = plan.sizes[name]
    divisor = _divisor(plan, name, axes)
    return have >= divisor and have % divisor == 0


def _draft(plan: Plan, name: str, axes: tuple[str, ...], tensor: TensorPlan) -> Draft:
    request, have, divisor = plan.request, plan.sizes[name], _divisor(plan, name, axes)
    noun = "row" if name == "batch" else "token"
    over = product(plan.mesh, axes)
    if name == "batch" and request.microbatches > 1:
        over += f", in {request.microbatches} microbatches: {divisor} chunks"
    elif divisor > plan.mesh.size(axes):
        over += f", twice for load balancing: {divisor} chunks"
    legal = nearest_multiples(divisor, have)
    needed = (
        f"at least {count(divisor, noun)}" if have < divisor else f"{either(legal)} {noun}s, which {divisor} divides"
    )
    number = tensor.in_use.logical_axes.index(name)
    empty = divisor - have
    finding = Finding(
        code="SW108",
        severity="error",
        tensor=tensor.name,
        where=f"'{name}' of {tensor.name}",
        notation=str(tensor.in_use),
        mark=place_in(tensor.in_use, number),
        found=f"{count(have, noun)}{' of each sequence' if name == 'length' else ''} over {over}",
        needed=needed,
        cost=f"{percent(empty / divisor)} of the devices would have no {noun}" if empty > 0 else "",
    )
    flag = "batch" if name == "batch" else "length"
    candidates = [option(flag, size) for size in reversed(legal)]
    if name == "batch":
        candidates += _fewer_microbatches(plan, axes)
        candidates += _sequence_instead(plan, axes)
    return Draft(finding=finding, candidates=tuple(candidates))


def _fewer_microbatches(plan: Plan, axes: tuple[str, ...]) -> list[Candidate]:
    rows, remainder = divmod(plan.request.batch, plan.mesh.size(axes))
    if remainder or rows < 1:
        return []
    return [option("microbatches", m) for m in reversed(divisors(rows)) if m < plan.request.microbatches]


def _sequence_instead(plan: Plan, axes: tuple[str, ...]) -> list[Candidate]:
    """An axis with role ``expert`` in ``moe`` may shard the sequence in place of rows."""
    layout = plan.request.layout
    return [
        entry(plan, axis, elsewhere="context")
        for axis in axes
        if layout.entries[axis].elsewhere == "fsdp" and layout.role(axis, "moe") == "expert"
    ]
