"""SW415 of pipelines: what an engine does not run of stages, with what it would run instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwright.core.checks.edits import entry, named_roles, of_recipe, option
from shardwright.core.engines.engines import ENGINES
from shardwright.core.engines.properties import EngineProperties
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import either, product
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.pipeline.derived import gathering_in
from shardwright.core.pipeline.program import padded_stacks
from shardwright.core.pipeline.requests import stage_axes
from shardwright.core.pipeline.tied import tied_stages
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.core.policies.policy import BASES, WEIGHTS, read_policy
from shardwright.core.policies.runs import runs_of
from shardwright.core.schedules.schedules import SCHEDULES

ENDS = ("embedding", "logits")


def engines_that(holds: Callable[[EngineProperties], bool]) -> tuple[Candidate, ...]:
    """The engines of which something holds: ``--engine jax``."""
    return tuple(option("engine", name) for name, engine in ENGINES.items() if holds(engine))


def stages_of_one_program(plan: Plan) -> Iterator[Draft]:
    """One program runs all stages: some devices wait while others compute, and arrays are equally large on all of them."""
    if plan.pipeline is None:
        return
    request, layout, axes = plan.request, plan.request.layout, plan.pipeline.axes
    schedule, engine = plan.pipeline.choice.schedule, request.properties
    padded = any(None in stack.layers for stack in padded_stacks(request.table, plan.pipeline.choice).values())
    others = (
        [option("schedule", name) for name in engine.schedules]
        if request.schedule is not None
        else [
            entry(plan, axis, schedule=name)
            for name in engine.schedules
            for axis in axes
            if layout.entries[axis].schedule is not None
        ]
    )
    cases: tuple[tuple[bool, str, str, str, Sequence[Candidate]], ...] = (
        (
            schedule not in engine.schedules,
            "schedule",
            f"schedule '{schedule}'",
            f"schedule {either(map(repr, engine.schedules))}, one program for all devices",
            others,
        ),
        *_policies(plan),
        (
            padded and request.optimizer.name.startswith("optax:"),
            "--optimizer",
            f"optimizer {request.optimizer.name} with stages that have unequally many layers",
            "an optimizer of its own, which changes each element alone: padding has no part in what others take a mean of",
            [Candidate(text="--optimizer adamw", edit=lambda request: replace(request, optimizer=ADAMW))],
        ),
    )
    for has, what, found, needed, fixes in cases:
        if has:
            finding = Finding(
                code=NOT_RUN,
                severity="error",
                where=f"{what} in stages of layout '{layout.name}'",
                position=layout.entries[axes[0]].position,
                found=f"{found}, which {engine.title} does not run",
                needed=needed,
            )
            yield Draft(finding=finding, candidates=tuple(fixes))


def _policies(plan: Plan) -> Iterator[tuple[bool, str, str, str, Sequence[Candidate]]]:
    """Policies of recomputation. A stage has arrays for its live microbatches, with as many rows for each layer of a stack."""
    request = plan.request
    parts, runs = read_policy(request.remat).parts, runs_of(request.table, request.remat)
    of_stacks = [run.stack for run in runs]
    ring = request.layout.move_attention == "ring" and bool(
        plan.mesh.larger_than_one(request.layout.axes_sharding("length", "attention"))
    )
    fixes = [option("remat", base) for base in reversed(BASES)]
    for has, what, needed in (
        (any(part.host for part in parts), "puts activations on the host", "a policy of what stays on the device"),
        (
            any(WEIGHTS in part.keep for part in parts),
            "keeps gathered weights of each microbatch",
            "weights that are gathered again, or once a step (keep_gathered on the axes that store them)",
        ),
        (len({*of_stacks}) < len(of_stacks), "is not of all layers of a stack", "one policy for all layers of a stack"),
        (
            ring and not all(run.keeps_nothing for run in runs),
            "keeps more than the inputs of layers beside a ring of attention",
            "--remat full, or another movement of attention: a layer with a ring is divided, and devices wait for each other in between",
        ),
    ):
        yield has, "--remat", f"--remat {request.remat} {what}", needed, fixes


def stages_of_ranks(plan: Plan) -> Iterator[Draft]:
    """Each rank has stages of its own, which begin and end with the residual stream, the embedding or the logits."""
    axes = stage_axes(plan.request, plan.mesh)
    if axes and plan.pipeline is not None:
        yield from _schedule(plan, axes[0])
        yield from _tied(plan)
        yield from _codes(plan, axes[0])
        yield from _scattered(plan)


def some_stay_gathered(plan: Plan) -> bool:
    """Whether in stages some weights of layers stay gathered, and others that are gathered do not."""
    if plan.pipeline is None:
        return False
    rows = [row for row in plan.weights if row.stack is not None]
    uses = [use for row in rows for use in weight_reshardings(plan.request, plan.mesh, row).values()]
    return len({use.kept for use in uses if use.gathered != use.at_rest}) > 1


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


def _schedule(plan: Plan, axis: str) -> Iterator[Draft]:
    assert plan.pipeline is not None
    choice, engine = plan.pipeline.choice, plan.request.properties
    if choice.schedule not in engine.schedules:
        run = engine.schedules
        others = engines_that(lambda other: choice.schedule in other.schedules)
        yield _refusal(
            plan,
            axis,
            f"schedule '{choice.schedule}' is that of one program for all devices, and {engine.framework} has a process for each",
            ", or ".join([either(run), *(fix.text for fix in others)]),
            *(option("schedule", name) for name in run),
            *(entry(plan, axis, schedule=name) for name in run),
            *others,
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
        rows = [plan.stage_plans[number].by_name[name] for number in (first, last)]
        at_rest, updated = ([row.at_rest for row in rows], [row.updated for row in rows])
        if updated[0] != updated[1] or at_rest[0] != at_rest[1]:
            assert plan.pipeline is not None
            when, specs = ("at rest", at_rest) if at_rest[0] != at_rest[1] else ("in its update", updated)
            yield _refusal(
                plan,
                plan.pipeline.axes[0],
                f"it is {specs[0]} {when} on stage {first} and {specs[1]} on stage {last}, whose gradients are summed",
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


def _codes(plan: Plan, axis: str) -> Iterator[Draft]:
    """Codes are gathered for a pass of a layer, with the reduction of its gradient in each microbatch."""
    recipe, why = plan.request.precision, _once_a_step(plan)
    if recipe is not None and why and any(weight.copies for weight in plan.quantized):
        yield _refusal(
            plan,
            axis,
            f"recipe '{recipe.name}' gathers codes of weights for each pass, and with {why} weights of a stage stay gathered",
            "gather_quantized: false, or a schedule and --remat under which weights are gathered for each pass",
            of_recipe(plan, gather_quantized=False),
            *_each_pass(),
        )


def _scattered(plan: Plan) -> Iterator[Draft]:
    """Gradients that wait for the end of a step are not scattered before."""
    why = _once_a_step(plan)
    for axis in plan.mesh.larger_than_one(plan.mesh.names) if why else ():
        if plan.request.layout.entries[axis].gradients:
            yield _refusal(
                plan,
                axis,
                f"it scatters gradients over {product(plan.mesh, [axis])} in each microbatch, and with {why} those of a stage wait for "
                f"the end of the step",
                "no such option, or a schedule and --remat under which gradients are reduced in each microbatch",
                entry(plan, axis, gradients=None),
                *_each_pass(),
            )


def _once_a_step(plan: Plan) -> str:
    """Why weights of a stage are gathered once a step, and their gradients reduced once; empty where they are not."""
    assert plan.pipeline is not None
    schedule = plan.pipeline.choice.schedule
    if not gathering_in(plan.request, plan.pipeline.choice).once:
        return ""
    return f"schedule '{schedule}'" if SCHEDULES[schedule].splits else f"--remat {plan.request.remat}"


def _each_pass() -> Iterator[Candidate]:
    yield option("remat", "full")
    for name, schedule in SCHEDULES.items():
        if not schedule.splits and name != "circular":
            yield option("schedule", name)
