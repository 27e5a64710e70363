"""The answers of a search as plans: ranked, with what each loses to the first, and which of them no other one beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.layout.wording import every
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.price import price
from shardwright.cost.stages import with_unit_costs
from shardwright.search.solving import EQUAL, Node, Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What makes most of the difference to the first answer: ``what`` takes so many ``seconds`` more."""

    what: str
    seconds: float

    def to_json(self) -> dict[str, object]:
        return {"what": self.what, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A plan with its ``rank``: equally fast ones have the same. ``bytes_between``: that a device sends a step over links between nodes or
    slices. ``unbeaten``: no other answer has a faster step, less memory and fewer bytes there. ``loss`` None: of the first."""

    rank: int
    node: Node
    plan: Plan
    bytes_between: int
    unbeaten: bool = True
    loss: Loss | None = None


def answered(solver: Solver, nodes: Sequence[Node]) -> tuple[Answered, ...]:
    """The answers in the order of their ranks, of equal ones the smallest first."""
    ordered: list[tuple[int, Node]] = []
    left = sorted(nodes, key=lambda node: node.key)
    while left:
        equal = [node for node in left if node.seconds <= left[0].seconds * (1 + EQUAL)]
        rank = len(ordered) + 1
        ordered += [(rank, node) for node in sorted(equal, key=lambda node: (node.bytes_per_device, node.key))]
        left = left[len(equal) :]
    plans = [_plan(solver, node) for _, node in ordered]
    sent = [_bytes_between(plan, map_mesh(plan.mesh, solver.machine)) for plan in plans]
    measures = [(node.seconds, node.bytes_per_device, num) for (_, node), num in zip(ordered, sent, strict=True)]
    return tuple(
        Answered(
            rank=rank,
            node=node,
            plan=plan,
            bytes_between=measure[2],
            unbeaten=not any(_beats(other, measure) for other in measures),
            loss=loss_to(plans[0], plan),
        )
        for (rank, node), plan, measure in zip(ordered, plans, measures, strict=True)
    )


def _plan(solver: Solver, node: Node) -> Plan:
    """The plan of an answer, without the checks that it has passed."""
    return price(resolve(with_unit_costs(solver.requested(node), solver.machine)), solver.machine)


def _beats(other: tuple[float, int, int], measure: tuple[float, int, int]) -> bool:
    return other != measure and all(a <= b for a, b in zip(other, measure, strict=True))


def _bytes_between(plan: Plan, mapping: MeshMapping) -> int:
    return round(
        sum(
            planned.bytes_per_device * planned.count_per_step
            for planned in plan.collectives
            if mapping.group(planned.axes).domains > 1
        )
    )


def loss_to(first: Plan, plan: Plan) -> Loss | None:
    """The largest of what a plan takes longer for than the first; None of the first, and where it has no time."""
    if plan is first or first.step is None or plan.step is None:
        return None
    exposed = plan.step.exposed_seconds - first.step.exposed_seconds
    before = _by_collective(first)
    longer = {what: seconds - before.get(what, 0.0) for what, seconds in _by_collective(plan).items()}
    name = max(longer, key=lambda what: longer[what], default="")
    causes = {
        "products and passes over memory": plan.step.compute_seconds - first.step.compute_seconds,
        "waiting of stages": plan.step.idle_seconds - first.step.idle_seconds,
        "copies to and from the host": plan.step.host_exposed_seconds - first.step.host_exposed_seconds,
        name or "communication": exposed,
    }
    what = max(causes, key=lambda cause: causes[cause])
    return Loss(what=what, seconds=causes[what])


def _by_collective(plan: Plan) -> Mapping[str, float]:
    seconds: dict[str, float] = {}
    for planned in plan.collectives:
        what = f"{planned.kind} over {every(planned.axes)} ({planned.component})"
        seconds[what] = seconds.get(what, 0.0) + (planned.seconds or 0.0)
    return seconds
