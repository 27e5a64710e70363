"""MaxText's settings of a pipeline: read into the stages of a layout, and written for one.

Layers in the pipeline are stages x ``num_layers_per_pipeline_stage`` x ``num_pipeline_repeats``, exactly: repeat r of stage s has the layers
that begin with number (r x stages + s) x layers of a stage, which is where stages go around here too. Its schedule is ``circular``. Of
DeepSeek's layers those with experts are in the pipeline; dense layers, the embedding and the logits are computed by all stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count
from shardwright.core.mesh.divisors import divisors
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.padded import layers_of
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.resolution.tensors import PIPELINED

PER_STAGE = "num_layers_per_pipeline_stage"
REPEATS = "num_pipeline_repeats"
MICROBATCHES = "num_pipeline_microbatches"
LAYERS = "pipeline_parallel_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """``repeats``: stages of each rank. ``layers``: those in the pipeline."""

    stages: int
    layers_per_stage: int
    repeats: int
    microbatches: int
    layers: int

    def to_json(self) -> dict[str, int]:
        return {
            "stages": self.stages,
            "layers_per_stage": self.layers_per_stage,
            "repeats": self.repeats,
            "microbatches": self.microbatches,
            "layers": self.layers,
        }


def pipelined_layers(table: ModelTable) -> int:
    """The layers that a pipeline can have."""
    return sum({w.stack: w.num for w in table.weights if w.stack in PIPELINED}.values())


def settings_of(configuration: Configuration, table: ModelTable, stages: int) -> PipelineSettings | Finding | None:
    """The pipeline of a configuration; None without one; a finding where MaxText ends with an error."""
    if stages == 1:
        return None
    layers = _positive(configuration, LAYERS) or pipelined_layers(table)
    each = _positive(configuration, PER_STAGE) or 1
    repeats = _positive(configuration, REPEATS) or max(1, layers // (stages * each))
    if stages * each * repeats != layers:
        right = [one for one in divisors(layers // stages) if layers % stages == 0]
        fix = f"Write '{PER_STAGE}: {right[-1]}' and '{REPEATS}: 1'." if right else ""
        return _finding(
            configuration,
            PER_STAGE,
            f"{count(stages, 'stage')} x {count(each, 'layer')} x {count(repeats, 'repeat')} = {stages * each * repeats}, of {count(layers, 'layer')}",
            "a product that is the number of layers in the pipeline",
            fix,
        )
    microbatches = _positive(configuration, MICROBATCHES) or stages
    if microbatches % stages:
        above = -(-microbatches // stages) * stages
        return _finding(
            configuration,
            MICROBATCHES,
            f"{count(microbatches, 'microbatch')} for {count(stages, 'stage')}",
            f"a multiple of {stages}",
            f"Write '{MICROBATCHES}: {above}'.",
        )
    return PipelineSettings(
        stages=stages, layers_per_stage=each, repeats=repeats, microbatches=microbatches, layers=layers
    )


def _positive(configuration: Configuration, key: str) -> int | None:
    """A number that is set; -1 is MaxText's for its own choice."""
    value = configuration.value_of(key)
    return None if value is None or int(value) < 1 else int(value)


def _finding(configuration: Configuration, key: str, found: str, needed: str, fix: str) -> Finding:
    scalar = configuration.settings.get(key)
    return Finding(
        code="SW110",
        severity="error",
        where=f"'{key}'",
        position=None if scalar is None else scalar.position,
        found=found,
        needed=needed,
        fix=fix,
    )


def outside(plan: Plan) -> int:
    """The layers of a plan's pipeline that MaxText has outside of its own: its stages have equally many."""
    return 0 if plan.pipeline is None else pipelined_layers(plan.request.table) % plan.pipeline.choice.num_stages


def unlike(plan: Plan) -> Iterator[tuple[str, str]]:
    """What MaxText's pipeline has otherwise than the plan's: what is found, and what is needed for it to be the same."""
    if plan.pipeline is None:
        return
    choice, rest = plan.pipeline.choice, outside(plan)
    each = pipelined_layers(plan.request.table) // choice.num_stages
    if rest:
        yield (
            f"{count(rest, 'layer')} outside of MaxText's pipeline, whose stages have equally many: every stage has them",
            "stages that divide the layers",
        )
    elif any(_pipelined_in(plan.request.table, stage) != each for stage in choice.stages):
        yield (
            f"{choice.text}: MaxText's stages have {count(each, 'layer')} each",
            f"--stages with {count(each, 'layer')} in each stage",
        )
    if choice.microbatches % choice.ranks:
        yield (
            f"{count(choice.microbatches, 'microbatch')}: MaxText's are a multiple of its {choice.ranks} stages, and {choice.ranks} by default",
            f"a multiple of {choice.ranks} microbatches",
        )


def _pipelined_in(table: ModelTable, stage: Stage) -> int:
    """The layers of a stage that MaxText has in its pipeline."""
    one_of_each = {weight.stack: weight for weight in table.weights if weight.stack in PIPELINED}
    return sum(len(layers_of(weight, stage)) for weight in one_of_each.values())


def settings_lines(plan: Plan) -> list[str]:
    """The settings of a plan's pipeline, a line each; none without one.

    Raises InputError for a schedule that is not MaxText's, and for fewer layers than stages.
    """
    name, pipeline = plan.request.layout.name, plan.pipeline
    if pipeline is None:
        return []
    choice = pipeline.choice
    given = plan.request.schedule or next(
        (entry.schedule for entry in plan.request.layout.entries.values() if entry.schedule), None
    )
    if given not in (None, "circular"):
        raise InputError(
            f"layout '{name}': schedule '{given}' cannot be said to MaxText, whose pipelines are 'circular'. Take 'schedule' out."
        )
    layers, rest = pipelined_layers(plan.request.table), outside(plan)
    if rest == layers:
        raise InputError(
            f"layout '{name}': {count(layers, 'layer')} in {count(choice.num_stages, 'stage')} cannot be said to MaxText: its stages have equally "
            f"many layers, and at least one."
        )
    microbatches = plan.request.microbatches
    return [
        *([f"{LAYERS}: {layers - rest}"] if rest else []),
        f"{PER_STAGE}: {layers // choice.num_stages}",
        f"{REPEATS}: {choice.virtual}",
        *([f"{MICROBATCHES}: {microbatches}"] if microbatches % choice.ranks == 0 else []),
    ]
