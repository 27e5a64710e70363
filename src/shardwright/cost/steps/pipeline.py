"""Seconds of a pipeline: its timetable on a clock, with the time of each stage's passes and of the transfers between stages.

| what | seconds |
|---|---|
| forward pass of a stage, for one microbatch | its products, the exposed communication of the phase, and exposed copies to the host |
| backward pass | what is recomputed, and the backward phase, in the same way |
| quantizing | the passes over memory of a microbatch's operands, all with its backward pass |
| its halves | half of the backward phase each; what is recomputed belongs to the gradient of the input |
| an end that all stages share | its phases, for one microbatch, on all ranks together: in addition to the timetable |
| weights that stay gathered, gradients reduced at the end | once a step, in equal parts with each microbatch |
| a transfer | a permute of the residual stream, hidden behind the passes between; a rank that waits for it is idle |

Reductions over replicas and the update of the weights come after the last pass, on every rank at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.pipeline.derived import gathering_in, gathering_of_ends, share_of_microbatch
from shardwright.core.plan.plan import Phase, Plan
from shardwright.core.schedules.actions import Kind
from shardwright.core.stages.gathering import Gathering
from shardwright.core.stages.planned import Pipeline
from shardwright.core.stages.units import PassCost
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, time_of, time_of_planned
from shardwright.cost.steps.copies import with_copies
from shardwright.cost.steps.flops import step_flops, update_bytes
from shardwright.cost.steps.precision import computing_seconds, moving_seconds, quantization_bytes
from shardwright.cost.steps.routing import EVEN
from shardwright.cost.steps.step import PhaseTime, all_seconds, constants_of, phase_times, to_host_seconds

Phases = Mapping[Phase, PhaseTime]

PASSES: tuple[Phase, ...] = ("forward", "recompute", "backward")
"""The phases of a microbatch; the update comes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPipeline:
    """The pipeline with its stages' work in seconds, and the step."""

    pipeline: Pipeline
    step: StepCost


def timed_pipeline(
    plan: Plan, mapping: MeshMapping, chip: ChipNumbers, reading: Reading, shares: float = EVEN
) -> TimedPipeline | None:
    """None if a collective has no time. ``shares``: of experts' rows, in every stage (``routing.py``)."""
    pipeline = plan.pipeline
    assert pipeline is not None
    rates = Rates.of(chip, reading)
    send = time_of("permute", max(stage.output_bytes for stage in pipeline.stages), mapping.group(pipeline.axes), rates)
    ends = plan.ends_plan
    planned = [*plan.stage_plans, *([] if ends is None else [ends])]
    gathering = gathering_in(plan.request, pipeline.choice)
    # Most stages have the rows of another one.
    found: dict[int, tuple[Phases | None, float]] = {}
    for one in planned:
        if id(one.tensors) not in found:
            of_its = gathering_of_ends(plan.request) if one is ends else gathering
            phases = _phases(one, mapping, chip, reading, of_its, plan.request.microbatches, shares)
            found[id(one.tensors)] = phases, _quantizing(one, chip, reading, shares)
    phases = [found[id(one.tensors)][0] for one in planned]
    quantizing = [found[id(one.tensors)][1] for one in planned]
    known = [one for one in phases if one is not None]
    if send is None or len(known) < len(phases):
        return None
    in_seconds = Pipeline.of(
        pipeline.axes,
        pipeline.choice,
        tuple(replace(stage, work=_work(known[stage.number], quantizing[stage.number])) for stage in pipeline.stages),
        unit="seconds",
        send_seconds=send.seconds,
    )
    if ends is not None and pipeline.shared is not None:
        work = _work(known[-1], quantizing[-1])
        in_seconds = replace(in_seconds, shared=replace(pipeline.shared, work=work))
    return TimedPipeline(pipeline=in_seconds, step=_step(plan, in_seconds, known, quantizing, chip, reading))


def pass_costs(
    stage: Plan, mapping: MeshMapping, gathering: Gathering, microbatches: int
) -> tuple[float, tuple[PassCost, ...]] | None:
    """Seconds of all passes of one microbatch of a stage, by the plan of the stage, and what each pass has of them; None if a collective has no
    time. What is gathered or reduced once a step counts in equal parts for each of the ``microbatches``."""
    chip = mapping.machine.numbers
    assert chip is not None
    phases = _phases(stage, mapping, chip, "used", gathering, microbatches)
    if phases is None:
        return None
    quantizing = _quantizing(stage, chip, "used")
    work, of_passes = _work(phases, quantizing), (phases[phase] for phase in PASSES)
    costs = [
        PassCost(computed=time.compute, hideable=time.hideable, waited=time.communication - time.hideable)
        for time in of_passes
    ]
    costs.append(PassCost(computed=quantizing, hideable=0.0, waited=0.0))
    return work["forward"] + work["backward"], tuple(costs)


def _phases(
    stage: Plan,
    mapping: MeshMapping,
    chip: ChipNumbers,
    reading: Reading,
    gathering: Gathering,
    microbatches: int,
    shares: float = EVEN,
) -> Phases | None:
    rates = Rates.of(chip, reading)
    times = [time_of_planned(one, mapping, rates) for one in stage.collectives]
    seconds = all_seconds(stage, times, chip, shares)
    known = [second for second in seconds if second is not None]
    computing = computing_seconds(stage, chip, reading, shares)
    if computing is None or len(known) < len(seconds):
        return None
    of_microbatch = [share_of_microbatch(planned, stage, gathering, microbatches) for planned in stage.collectives]
    shared = [second * share for second, share in zip(known, of_microbatch, strict=True)]
    return phase_times(stage, shared, with_copies(computing, stage, chip, reading, of_microbatch), chip, reading)


def _work(phases: Phases, quantizing: float) -> Mapping[Kind, float]:
    forward, again, backward = (_busy(phases[phase]) for phase in PASSES)
    return {
        "forward": forward,
        "backward": quantizing + again + backward,
        "input_gradient": quantizing + again + backward / 2,
        "weight_gradient": backward / 2,
    }


def _quantizing(planned: Plan, chip: ChipNumbers, reading: Reading, shares: float = EVEN) -> float:
    return moving_seconds(chip, quantization_bytes(planned, chip, shares), reading)


def _busy(time: PhaseTime) -> float:
    return time.compute + time.exposed + time.host_exposed


def _step(
    plan: Plan,
    pipeline: Pipeline,
    phases: Sequence[Phases],
    quantizing: Sequence[float],
    chip: ChipNumbers,
    reading: Reading,
) -> StepCost:
    microbatches, rank = plan.request.microbatches, pipeline.slowest
    planned = [*plan.stage_plans, *([] if plan.ends_plan is None else [plan.ends_plan])]
    of_all = range(len(plan.stage_plans), len(planned))
    own = [*(stage.number for stage in pipeline.of_rank(rank)), *of_all]
    compute, communication, exposed, waiting = (
        microbatches * sum(getattr(phases[number][phase], what) for number in own for phase in PASSES)
        for what in ("compute", "communication", "exposed", "host_exposed")
    )
    to_host = [to_host_seconds(planned[number], chip, reading) for number in own]
    updates = [
        sum(phases[number]["update"].exposed for number in (*(stage.number for stage in pipeline.of_rank(r)), *of_all))
        for r in range(pipeline.choice.ranks)
    ]
    shared = 0.0 if pipeline.shared is None else microbatches * pipeline.shared.busy
    update = moving_seconds(chip, update_bytes(plan), reading) + chip.step_latency_s
    compute += microbatches * sum(quantizing[number] for number in own)
    sent = pipeline.sends(rank) * (pipeline.send_seconds or 0.0)
    return StepCost(
        seconds=pipeline.run.seconds + shared + max(updates) + update,
        compute_seconds=compute + update,
        communication_seconds=communication + sent + max(updates),
        exposed_seconds=exposed + max(updates),
        host_seconds=None if None in to_host else 2 * microbatches * sum(one or 0.0 for one in to_host),
        host_exposed_seconds=waiting,
        idle_seconds=pipeline.run.seconds - pipeline.run.busy[rank],
        flops_per_device=microbatches * sum(sum(step_flops(planned[number]).values()) for number in own),
        constants=constants_of(chip, plan),
    )
