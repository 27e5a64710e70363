"""SW415 of pipelines: what an engine does not run of stages, with what it would run instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.core.checks.edits import attention_move, entry, named_roles, option, without
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.layout.wording import either
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.pipeline.program import padded_stacks
from shardwright.core.pipeline.requests import stage_axes
from shardwright.core.pipeline.tied import tied_stages
from shardwright.core.plan.plan import Plan
from shardwright.core.schedules.schedules import SCHEDULES

ENDS = ("embedding", "logits")


def stages_on_jax(plan: Plan) -> Iterator[Draft]:
    """One program runs all stages: some devices wait while others compute, and arrays are equally large on all of them."""
    if plan.pipeline is None:
        return
    request, layout, axes = plan.request, plan.request.layout, plan.pipeline.axes
    schedule = plan.pipeline.choice.schedule
    padded = any(None in stack.layers for stack in padded_stacks(request.table, plan.pipeline.choice).values())
    ends = {end: layout.role(axis, end) for axis in axes for end in OUTSIDE_LAYERS if layout.role(axis, end) != "idle"}
    circular = (
        [option("schedule", "circular")]
        if request.schedule is not None
        else [entry(plan, axis, schedule="circular") for axis in axes if layout.entries[axis].schedule is not None]
    )
    cases: tuple[tuple[bool, str, str, Sequence[Candidate]], ...] = (
        (
            schedule != "circular",
            f"schedule '{schedule}'",
            "schedule 'circular', one program for all devices",
            circular,
        ),
        (
            request.remat != "full",
            f"--remat {request.remat} in stages",
            "--remat full: between its two passes a microbatch keeps the inputs of layers alone",
            [option("remat", "full")],
        ),
        (request.precision is not None, "products of low precision in stages", "none", [without("precision")]),
        (
            padded and request.optimizer.name.startswith("optax:"),
            f"optimizer {request.optimizer.name} with stages that have unequally many layers",
            "an optimizer of its own, which changes each element alone: padding has no part in what others take a mean of",
            [Candidate(text="--optimizer adamw", edit=lambda request: replace(request, optimizer=ADAMW))],
        ),
        (
            layout.move_attention == "ring" and bool(plan.mesh.larger_than_one(plan.cp)),
            "a ring of attention in stages, whose permutes need all devices of the program, while some wait",
            "move.attention 'gather' or 'ulysses'",
            [attention_move("gather"), attention_move("ulysses")],
        ),
        (
            bool(ends),
            f"role '{next(iter(ends.values()), '')}' for a stage axis in '{next(iter(ends), '')}'",
            "no other role: each stage computes its own layers and ends",
            [entry(plan, axis, named={}) for axis in axes],
        ),
    )
    for has, found, needed, fixes in cases:
        if has:
            finding = Finding(
                code=NOT_RUN,
                severity="error",
                where=f"stages of layout '{layout.name}'",
                position=layout.entries[axes[0]].position,
                found=f"{found}, which the JAX engine does not run",
                needed=needed,
            )
            yield Draft(finding=finding, candidates=tuple(fixes))


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
