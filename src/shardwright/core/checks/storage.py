"""Storage dims: SW114 for a dim that is too small for its storage axes, SW118 for another dim than the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import gcd

from shardwright.core.checks.edits import entry, resized, rule
from shardwright.core.checks.tensors import largest_first, weight_rows
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import OVERSHARDED_ELEMENTS
from shardwright.core.layout.roles import ROLES, UNIT_NAMES
from shardwright.core.layout.wording import counted, every, others, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.mesh.notation import place_in
from shardwright.core.model.table import Weight
from shardwright.core.plan.plan import Plan, TensorPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One weight with the storage axes, larger than 1, that share a storage list, and the dim that they were granted."""

    tensor: TensorPlan
    weight: Weight
    axes: tuple[str, ...]
    tried: tuple[str, ...]
    granted: str | None


def stored_weights(plan: Plan) -> Iterator[Stored]:
    """Each weight that has a storage list, once for each list that its axes share."""
    for tensor, weight in weight_rows(plan):
        lists: dict[tuple[tuple[str, ...], str | None], list[str]] = {}
        for request in tensor.axis_requests:
            by_list = request.granted or request.refused == "none-divides"
            if ROLES[request.role].stores and request.tried and by_list and plan.mesh.size(request.axis) > 1:
                lists.setdefault((request.tried, request.granted), []).append(request.axis)
        for (tried, granted), axes in lists.items():
            yield Stored(tensor=tensor, weight=weight, axes=tuple(axes), tried=tried, granted=granted)


def too_small(plan: Plan) -> Iterator[Draft]:
    """SW114: an error where no dim of the storage list divides, a warning where one has too few elements left."""
    groups: dict[tuple[object, ...], list[Stored]] = {}
    thin: dict[tuple[object, ...], list[Stored]] = {}
    for stored in stored_weights(plan):
        if stored.granted is None:
            groups.setdefault((stored.tried[0], stored.weight.size(stored.tried[0]), stored.axes), []).append(stored)
        elif stored.granted not in UNIT_NAMES and not _ruled(plan, stored):
            left = stored.weight.size(stored.granted) / plan.mesh.size(stored.tensor.spec.axes_of(stored.granted))
            if left < OVERSHARDED_ELEMENTS.value:
                thin.setdefault((stored.granted, stored.weight.size(stored.granted), stored.axes), []).append(stored)
    common = _common_product(plan, [stored for group in groups.values() for stored in group])
    for group in groups.values():
        yield _none_divides(plan, group, common)
    for group in thin.values():
        yield _few_left(plan, group)


def _ruled(plan: Plan, stored: Stored) -> bool:
    return any(
        r.component == stored.tensor.component and r.logical_axis == stored.granted for r in plan.request.layout.rules
    )


def _already(plan: Plan, stored: Stored, name: str) -> int:
    return plan.mesh.size(stored.tensor.spec.axes_of(name))


def largest_product(plan: Plan, stored: Stored) -> tuple[str, tuple[str, ...]]:
    """The dim of the storage list and the storage axes with the largest product that divides it."""
    best: tuple[str, tuple[str, ...]] = (stored.tried[0], ())
    for name in stored.tried:
        for number in range(1, len(stored.axes) + 1):
            for axes in combinations(stored.axes, number):
                size = plan.mesh.size(axes)
                divides = stored.weight.size(name) % (size * _already(plan, stored, name)) == 0
                if divides and size > plan.mesh.size(best[1]):
                    best = (name, axes)
    return best


def _legal_product(plan: Plan, stored: Stored) -> int:
    """The largest number of devices, for any axes, that would divide one dim of the list."""
    have = plan.mesh.size(stored.axes)
    return max(gcd(stored.weight.size(name) // _already(plan, stored, name), have) for name in stored.tried)


def _common_product(plan: Plan, weights: list[Stored]) -> int:
    """The largest number of devices that is possible for each of the weights."""
    return min((_legal_product(plan, stored) for stored in weights), default=1)


def _none_divides(plan: Plan, group: list[Stored], common: int) -> Draft:
    tensor = largest_first(stored.tensor for stored in group)[0]
    stored = next(s for s in group if s.tensor is tensor)
    have = plan.mesh.size(stored.axes)
    dims = [counted(stored.weight.size(name), name) for name in stored.tried]
    name, axes = largest_product(plan, stored)
    spec = tensor.spec
    best = f"{product(plan.mesh, axes)} divides '{name}'" if axes else "none of these axes divides any of them alone"
    names = [tensor.name, *(s.tensor.name for s in group if s.tensor is not tensor)]
    finding = Finding(
        code="SW114",
        severity="error",
        tensor=tensor.name,
        where=f"storage dim of {tensor.name}",
        position=plan.request.layout.entries[stored.axes[-1]].position,
        notation=str(spec),
        mark=place_in(spec, spec.logical_axes.index(stored.tried[0])),
        found=f"{product(plan.mesh, stored.axes)} divides neither {' nor '.join(dims)}"
        if len(dims) > 1
        else f"{product(plan.mesh, stored.axes)} does not divide {dims[0]}",
        needed=f"a product of at most {_common_product(plan, group)}; of these axes, {best}",
        cost=f"{others(names, 'weight')} would be replicated over {have} devices at rest",
    )
    return Draft(finding=finding, candidates=tuple(_cures(plan, group, stored, common)))


def _cures(plan: Plan, group: list[Stored], stored: Stored, common: int) -> Iterator[Candidate]:
    """More replicas; the expert axis as a replica outside the experts; the largest product, by a rule."""
    layout = plan.request.layout
    name, axes = largest_product(plan, stored)
    for target in dict.fromkeys((common, _common_product(plan, group))):
        for axis in sorted(stored.axes, key=lambda a: -plan.mesh.size(a)):
            rest = plan.mesh.size(a for a in stored.axes if a != axis)
            if target % rest == 0:
                yield from resized(plan, axis, target // rest, absorbing=("data",))
    for axis in stored.axes:
        if layout.role(axis, "moe") == "expert" and layout.entries[axis].elsewhere == "fsdp":
            yield entry(plan, axis, elsewhere="data")
    if axes:
        yield rule(stored.tensor.component, name, axes)
    for axis in sorted(stored.axes, key=lambda a: -plan.mesh.size(a)):
        for size in reversed(divisors(plan.mesh.size(axis))[:-1]):
            yield from resized(plan, axis, size, absorbing=("data", "fsdp"))


def _few_left(plan: Plan, group: list[Stored]) -> Draft:
    tensor = largest_first(stored.tensor for stored in group)[0]
    stored = next(s for s in group if s.tensor is tensor)
    name = stored.granted
    assert name is not None
    spec, size = tensor.spec, stored.weight.size(name)
    axes = spec.axes_of(name)
    left = size / plan.mesh.size(axes)
    names = [tensor.name, *(s.tensor.name for s in group if s.tensor is not tensor)]
    finding = Finding(
        code="SW114",
        severity="warning",
        tensor=tensor.name,
        where=f"storage dim '{name}' of {tensor.name}",
        notation=str(spec),
        mark=place_in(spec, spec.logical_axes.index(name)),
        found=f"{counted(size, name)} over {product(plan.mesh, axes)}: {left:.3g} on each device",
        needed=f"at least {OVERSHARDED_ELEMENTS.value}",
        cost=f"{OVERSHARDED_ELEMENTS.why} ({others(names, 'weight')})",
    )
    return Draft(finding=finding)


def another_dim(plan: Plan) -> Iterator[Draft]:
    """SW118: weights whose storage axes do not shard the first dim of their list, grouped by the two dims."""
    groups: dict[tuple[object, ...], list[Stored]] = {}
    for stored in stored_weights(plan):
        if stored.granted is not None and stored.granted != stored.tried[0] and not _ruled(plan, stored):
            first = stored.tried[0]
            groups.setdefault((first, stored.weight.size(first), stored.granted, stored.axes), []).append(stored)
    for group in groups.values():
        tensor = largest_first(stored.tensor for stored in group)[0]
        stored = next(s for s in group if s.tensor is tensor)
        assert stored.granted is not None
        spec = tensor.spec
        passed = stored.tried[: stored.tried.index(stored.granted)]
        names = [tensor.name, *(s.tensor.name for s in group if s.tensor is not tensor)]
        axes = product(plan.mesh, (*spec.axes_of(passed[0]), *stored.axes))
        yield Draft(
            finding=Finding(
                code="SW118",
                severity="info",
                tensor=tensor.name,
                where=f"storage dim of {tensor.name}",
                notation=str(spec),
                mark=place_in(spec, spec.logical_axes.index(stored.granted)),
                found=f"{every(counted(stored.weight.size(n), n) for n in passed)}: {axes} does not divide it, so "
                f"'{stored.granted}' is sharded",
                needed=f"a product that divides {stored.weight.size(passed[0])}, to shard '{passed[0]}'",
                cost=f"{others(names, 'weight')} are sharded on another dim than the rest",
            )
        )
