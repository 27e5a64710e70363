"""SW110: pipeline stages against the layers, the microbatches and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import gcd

from shardwright.core.checks.edits import both, entry, named_roles, option, resized, without
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, count, either, every, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.mesh.notation import place_in
from shardwright.core.pipeline.requests import chosen_stages, stage_axes
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.core.stages.choice import Fault
from shardwright.core.stages.planned import Pipeline

OWN_PROGRAM = "no schedule is known of a user's own program"


def stages(plan: Plan) -> Iterator[Draft]:
    """Units and microbatches that do not make the stages of a schedule, stages that wait, and a tied weight on two stages. Of a user's own
    program, stacks of layers that the stages do not divide."""
    if plan.request.table.owner != "ours":
        yield from _undivided(plan)
        yield from _options_without_stages(plan, OWN_PROGRAM, "a model of ours")
        yield from _entries_of_own_program(plan)
        return
    choice = chosen_stages(plan.request, plan.mesh)
    if choice is None:
        lacking = f"no axis of layout '{plan.request.layout.name}' divides the layers"
        yield from _options_without_stages(plan, lacking, "an axis of role 'stage' that is larger than 1")
        return
    for fault in choice.faults:
        yield _fault(plan, fault)
    if plan.pipeline is not None:
        yield from _waiting(plan, plan.pipeline)
        yield from _gathered(plan, plan.pipeline)
        yield from _tied(plan, plan.pipeline)


def _fault(plan: Plan, fault: Fault) -> Draft:
    axis = stage_axes(plan.request, plan.mesh)[0]
    declared = plan.request.layout.entries[axis]
    readers = plan.mesh.size(plan.dp)
    # Of two faults at one place neither could be removed alone.
    place = "microbatches under" if fault.microbatches else f"axis '{axis}' of"
    candidates: list[Candidate] = []
    for number in fault.microbatches:
        candidates.append(option("microbatches", number))
        candidates.append(both(option("batch", readers * number), option("microbatches", number)))
    candidates += [entry(plan, axis, virtual=number) for number in fault.virtual]
    for ranks in fault.ranks:
        candidates += resized(plan, axis, ranks)
    if fault.without_stages:
        candidates.append(without("stages"))
    if fault.other_ends:
        candidates += _same_ends(plan, axis)
    if fault.one_entry:
        candidates += _one_entry(plan)
    return Draft(
        finding=Finding(
            code="SW110",
            severity="error",
            where=f"{place} layout '{plan.request.layout.name}'",
            position=declared.position,
            found=fault.found,
            needed=fault.needed,
        ),
        candidates=tuple(candidates),
    )


def _one_entry(plan: Plan) -> Iterator[Candidate]:
    """The options of a pipeline on one of its axes, and on no other."""
    axes = stage_axes(plan.request, plan.mesh)
    for kept in axes:
        yield reduce(both, (entry(plan, axis, virtual=None, schedule=None) for axis in axes if axis != kept))


def _same_ends(plan: Plan, axis: str) -> Iterator[Candidate]:
    """The role of one end in the other too, or no role of its own in either."""
    named = named_roles(plan.request.layout.entries[axis])
    own = [role for end in ("embedding", "logits") if (role := named.get(end)) is not None]
    for role in own:
        yield entry(plan, axis, named={**named, "embedding": role, "logits": role})
    yield entry(plan, axis, named={name: role for name, role in named.items() if name not in ("embedding", "logits")})


def _options_without_stages(plan: Plan, lacking: str, needed: str) -> Iterator[Draft]:
    for name in ("schedule", "stages"):
        value = getattr(plan.request, name)
        if value is not None:
            yield Draft(
                finding=Finding(
                    code="SW110",
                    severity="error",
                    where=f"--{name}",
                    found=f"--{name} {value}, and {lacking}",
                    needed=needed,
                ),
                candidates=(without(name),),
            )


def _entries_of_own_program(plan: Plan) -> Iterator[Draft]:
    for axis, declared in plan.request.layout.entries.items():
        given = {name: value for name in ("virtual", "schedule") if (value := getattr(declared, name)) is not None}
        if given:
            yield Draft(
                finding=Finding(
                    code="SW110",
                    severity="error",
                    where=f"axis '{axis}' of layout '{plan.request.layout.name}'",
                    position=declared.position,
                    found=f"{every([f'{name} {value}' for name, value in given.items()])}, and {OWN_PROGRAM}",
                    needed="role stage without them, or a model of ours",
                ),
                candidates=(entry(plan, axis, **dict.fromkeys(given)),),
            )


def _waiting(plan: Plan, pipeline: Pipeline) -> Iterator[Draft]:
    """Fewer microbatches than ranks: some rank waits in every schedule."""
    choice, readers = pipeline.choice, plan.mesh.size(plan.dp)
    if choice.microbatches >= choice.ranks:
        return
    # Numbers that leave a device without a row need not be planned.
    filling = [
        number
        for number in (4 * choice.ranks, 2 * choice.ranks, choice.ranks)
        if plan.request.batch % (readers * number) == 0
    ]
    yield Draft(
        finding=Finding(
            code="SW110",
            severity="warning",
            where=f"microbatches under layout '{plan.request.layout.name}'",
            position=plan.request.layout.entries[pipeline.axes[0]].position,
            found=f"{count(choice.microbatches, 'microbatch')} for {product(plan.mesh, pipeline.axes)}",
            needed=f"at least {choice.ranks} microbatches, one for each rank of the pipeline",
            cost=pipeline.idle_text,
        ),
        candidates=(
            *(option("microbatches", number) for number in filling),
            both(option("batch", readers * choice.ranks), option("microbatches", choice.ranks)),
        ),
    )


def _gathered(plan: Plan, pipeline: Pipeline) -> Iterator[Draft]:
    """A divided backward pass, whose second half needs the weights that the first one had: PyTorch keeps those of a stage gathered."""
    schedule = pipeline.choice.schedule
    if not SCHEDULES[schedule].splits or not pipeline.stages[0].gathered_bytes:
        return
    most = max(sum(stage.gathered_bytes for stage in pipeline.of_rank(r)) for r in range(pipeline.choice.ranks))
    axis = pipeline.axes[0]
    whole = [name for name, one in SCHEDULES.items() if not one.splits and name != "circular"]
    yield Draft(
        finding=Finding(
            code="SW110",
            severity="info",
            where=f"schedule '{schedule}' of layout '{plan.request.layout.name}'",
            position=plan.request.layout.entries[axis].position,
            found=f"schedule '{schedule}' divides the backward pass: weights of a stage stay gathered, and their gradients unsharded, until "
            f"the end of a step",
            needed="nothing; a weight that is freed between the halves would have no gradient, or a wrong one. Schedules "
            f"{either(whole)} free each layer's",
            cost=f"{bytes_text(most)} on a device, and one gather of each weight a step",
        ),
        candidates=(),
    )


def _tied(plan: Plan, pipeline: Pipeline) -> Iterator[Draft]:
    """A weight that is used at both ends, whose stages are on two ranks: each has it, and their gradients are summed."""
    by_end = {
        end: next((stage for stage in pipeline.stages if getattr(stage.stage, end)), None)
        for end in ("embedding", "logits")
    }
    first, last = by_end["embedding"], by_end["logits"]
    if plan.request.properties.one_program or first is None or last is None or first.rank == last.rank:
        return
    for tensor in plan.weights:
        if not plan.request.table.weight(tensor.name).uses:
            continue
        folded = [name for name, schedule in SCHEDULES.items() if schedule.placement == "v"]
        yield Draft(
            finding=Finding(
                code="SW110",
                severity="info",
                tensor=tensor.name,
                where=tensor.name,
                found=f"stages {first.number} and {last.number}, of ranks {first.rank} and {last.rank}, both use it",
                needed=f"nothing; schedules {either(folded)} have both stages on one rank",
                cost=f"{bytes_text(tensor.bytes_per_device)} more on a device, and an exchange of its gradient in each step",
            ),
            candidates=(),
        )


def _undivided(plan: Plan) -> Iterator[Draft]:
    """Stages of a user's own program: each has equally many layers of every stack."""
    stacked = [t for t in plan.weights if len(t.spec.dims) > len(t.shape)]
    axes = plan.mesh.larger_than_one({a: None for t in stacked for a in t.spec.dims[0].axes})
    if not axes:
        return
    num_stages = plan.mesh.size(axes)
    first = {tensor.num: tensor for tensor in reversed(stacked)}
    common = gcd(*first)
    for num, tensor in sorted(first.items()):
        if num % num_stages:
            yield _uneven(plan, axes, num, tensor, common)


def _uneven(plan: Plan, axes: tuple[str, ...], num: int, tensor: TensorPlan, common: int) -> Draft:
    num_stages = plan.mesh.size(axes)
    legal = [size for size in divisors(common) if size < num_stages]
    return Draft(
        finding=Finding(
            code="SW110",
            severity="error",
            tensor=tensor.name,
            where=f"layers of {tensor.name}",
            notation=str(tensor.spec),
            mark=place_in(tensor.spec, 0),
            found=f"{count(num, 'layer')} over {product(plan.mesh, axes)}",
            needed=f"stages that divide every stack of layers: {either(divisors(common))}",
            cost=f"the fullest stage would have {-(-num // num_stages)} of these layers; an even share is {num / num_stages:.3g}",
        ),
        candidates=tuple(c for size in reversed(legal) for c in resized(plan, axes[0], size)),
    )
