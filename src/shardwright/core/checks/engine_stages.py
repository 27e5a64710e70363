"""SW415 of pipelines: what the PyTorch engine does not run of stages, with what it would run instead."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry, named_roles, option, without
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import either
from shardwright.core.pipeline.requests import stage_axes
from shardwright.core.pipeline.tied import tied_stages
from shardwright.core.plan.plan import Plan
from shardwright.core.schedules.schedules import SCHEDULES

ENDS = ("embedding", "logits")


def stages_on_torch(plan: Plan) -> Iterator[Draft]:
    """Each rank has stages of its own, which begin and end with the residual stream, the embedding or the logits."""
    axes = stage_axes(plan.request, plan.mesh)
    for axis in axes:
        yield from _shared_ends(plan, axis)
    if axes and plan.pipeline is not None:
        yield from _schedule(plan, axes[0])
        yield from _tied(plan)
        yield from _low_precision(plan)


def _refusal(
    plan: Plan, axis: str, found: str, needed: str, *candidates: Candidate, tensor: str | None = None
) -> Draft:
    where = f"axis '{axis}' of layout '{plan.request.layout.name}'" if tensor is None else tensor
    return Draft(
        finding=Finding(
            code=NOT_RUN,
            severity="error",
            tensor=tensor,
            where=where,
            position=plan.request.layout.entries[axis].position,
            found=found,
            needed=needed,
        ),
        candidates=candidates,
    )


def _shared_ends(plan: Plan, axis: str) -> Iterator[Draft]:
    one = plan.request.layout.entries[axis]
    others = {end: one.roles[end] for end in ENDS if one.roles[end] != "idle"}
    if others:
        roles = " and ".join(f"'{role}' in '{end}'" for end, role in others.items())
        yield _refusal(
            plan,
            axis,
            f"it is {roles}: all stages would share that end, which the PyTorch engine does not run",
            "no other role: each end has one stage",
            entry(plan, axis, named={name: role for name, role in named_roles(one).items() if name not in others}),
        )


def _schedule(plan: Plan, axis: str) -> Iterator[Draft]:
    assert plan.pipeline is not None
    choice = plan.pipeline.choice
    if choice.schedule == "circular":
        run = [name for name in SCHEDULES if name != "circular"]
        yield _refusal(
            plan,
            axis,
            "schedule 'circular' is that of one program for all devices, and PyTorch has a process for each",
            f"{either(run)}, or --engine jax",
            *(option("schedule", name) for name in run),
            *(entry(plan, axis, schedule=name) for name in run),
            option("engine", "jax"),
        )
    if SCHEDULES[choice.schedule].splits and plan.request.remat == "dots":
        yield _refusal(
            plan,
            axis,
            f"schedule '{choice.schedule}' divides the backward pass, and --remat dots computes again what both halves need",
            "--remat full or none",
            option("remat", "full"),
            option("remat", "none"),
        )


def _tied(plan: Plan) -> Iterator[Draft]:
    """Both stages hold a tied weight, and add their gradients element by element."""
    for name, (first, last) in tied_stages(plan.stage_plans).items():
        specs = [plan.stage_plans[number].by_name[name].at_rest for number in (first, last)]
        if specs[0] != specs[1]:
            assert plan.pipeline is not None
            yield _refusal(
                plan,
                plan.pipeline.axes[0],
                f"it is {specs[0]} at rest on stage {first} and {specs[1]} on stage {last}, whose gradients are summed",
                "the same spec on both",
                *_same_roles(plan),
                tensor=name,
            )


def _same_roles(plan: Plan) -> Iterator[Candidate]:
    """Each axis with different roles at the two ends, with the same role in both."""
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        one = plan.request.layout.entries[axis]
        roles = dict.fromkeys(one.roles[end] for end in ENDS)
        if len(roles) > 1:
            for role in roles:
                yield entry(plan, axis, named={**named_roles(one), **dict.fromkeys(ENDS, role)})


def _low_precision(plan: Plan) -> Iterator[Draft]:
    if plan.request.precision is not None:
        assert plan.pipeline is not None
        yield _refusal(
            plan,
            plan.pipeline.axes[0],
            f"recipe '{plan.request.precision.name}' in stages, which the PyTorch engine does not run yet",
            "stages without a recipe, or a recipe without stages",
            without("precision"),
        )
