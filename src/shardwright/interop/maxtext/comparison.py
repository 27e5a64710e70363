"""A layout in roles, planned and compared with the rules that it came from, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.wording import count, others
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.interop.maxtext.resolution.placement import Imported, Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that rules and roles shard differently, each in its own notation. ``order``: only the order of axes on a dim differs."""

    tensor: str
    kind: str
    rules: str
    roles: str
    order: bool

    def to_json(self) -> dict[str, object]:
        return {
            "tensor": self.tensor,
            "kind": self.kind,
            "rules": self.rules,
            "roles": self.roles,
            "order_only": self.order,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plan of a layout, the number of compared tensors, and those that differ."""

    layout: Layout
    plan: Plan
    compared: int
    differences: tuple[Difference, ...]

    @property
    def finding(self) -> Finding | None:
        """SW123 for the tensors whose sharding roles cannot express; None where there are none."""
        other = [each for each in self.differences if not each.order]
        if not other:
            return None
        weights = [each.tensor for each in other if each.kind == "weight"]
        names = [each.tensor for each in other]
        shown = "\n".join(f"{each.tensor}: {each.rules} by rules, {each.roles} by roles" for each in other)
        return Finding(
            code="SW123",
            severity="info",
            where=f"layout '{self.layout.name}' compared with the rules",
            found=f"{len(other)} of {count(self.compared, 'tensor')} that roles shard differently ({others(names, 'tensor')}), "
            f"{count(len(weights), 'weight')} among them\n{shown}",
            needed="the same sharding in both",
        )


def compared(imported: Imported, request: Request) -> Comparison:
    """A layout, planned for the model and compared with the rules. Raises FindingsError where there is no plan."""
    plan = make_plan(request)
    pairs = [(placed, plan.by_name[placed.tensor.ours]) for placed in imported.placed if placed.tensor.ours]
    return Comparison(
        layout=request.layout,
        plan=plan,
        compared=len(pairs),
        differences=tuple(difference for pair in pairs for difference in _difference(*pair)),
    )


def _difference(placed: Placed, planned: TensorPlan) -> Iterator[Difference]:
    theirs = {dim: axes for dim, axes in zip(placed.tensor.dims, placed.dim_axes, strict=True) if axes}
    ours = {_their_dim(dim.logical_axis, theirs): dim.axes for dim in planned.spec.dims if dim.axes}
    if theirs == ours:
        return
    same = {dim: set(axes) for dim, axes in theirs.items()} == {dim: set(axes) for dim, axes in ours.items()}
    yield Difference(
        tensor=placed.tensor.name,
        kind=placed.tensor.kind,
        rules=placed.notation,
        roles=str(planned.spec),
        order=same,
    )


def _their_dim(dim: str, theirs: dict[str, tuple[str, ...]]) -> str:
    """The dims of a split row are its length, where the rules only have that."""
    return "length" if dim in ("groups", "q_length") and dim not in theirs else dim
