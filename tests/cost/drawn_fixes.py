"""Draws requests on chips, types each fix that is printed, and plans it: it ends its error, or is faster or smaller by the plan.

``python -m tests.cost.drawn_fixes --count 300 --seed 1`` prints how many of each, and by how much; with ``--compiled`` of the findings about
compiled programs in which a compiler did not do what the request asks for.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pytest

from shardwright import FindingsError, load_layout, make_plan
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.findings import compiled_findings
from shardwright.compiled.reading.program import CompiledProgram, Temporary
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.cost import price, read_machine
from shardwright.cost.advice import settling_on
from shardwright.models import build
from shardwright.search import arrangements, presets_for
from tests.compiled.programs import remembered
from tests.golden import compiled_programs as programs
from tests.golden.findings_case import Case, request
from tests.golden.typed_fix import typed

MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek3-671b", "deepseek3-test", "llama3-test")
CHIPS = ("h100:1x8", "h100:4x8", "h100:32x8", "b200:2x8", "v5p:4x4x8", "v6e:16x16", "v5e:4x4")
LENGTHS = (512, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fix that was typed did. ``gain``: the share of a token's time that it saves."""

    case: Case
    finding: Finding
    kind: str
    gain: float | None


def drawn_case(draw: random.Random, models: Sequence[str] = MODELS) -> Case:
    table = build(draw.choice(models))
    machine_text = draw.choice(CHIPS)
    machine = read_machine(machine_text)
    layouts = [load_layout(name) for name in presets_for(table)]
    chosen = draw.choice(arrangements(table, machine, layouts))
    sizes = dict(chosen.sizes)
    axes = [axis for axis, size in sizes.items() if size > 1]
    if len(sizes) > 1 and axes and draw.random() < 0.5:
        # A factor of 2 or 4 moves from one axis to another.
        source, factor = draw.choice(axes), draw.choice((2, 4))
        if sizes[source] % factor == 0:
            sizes[source] //= factor
            sizes[draw.choice([axis for axis in sizes if axis != source])] *= factor
    options = {
        "mesh_sizes": sizes,
        "batch": machine.num_devices * draw.choice((1, 1, 2, 4)) // draw.choice((1, 1, 2)),
        "length": draw.choice(LENGTHS),
        "microbatches": draw.choice((1, 1, 2)),
        "engine": draw.choice(("jax", "torch")),
        "remat": draw.choice(("full", "dots", "none")),
    }
    return Case(
        name="SW000", model=table.name, layout=chosen.layout.name, neighbour={}, options=options, chips=machine_text
    )


def plan_of(case: Case) -> Plan:
    machine = read_machine(case.chips)
    asked = request(case)
    found = arrangements(asked.table, machine, [load_layout(name) for name in presets_for(asked.table)])
    elsewhere = [one.candidate for one in found if one.layout.name != asked.layout.name]
    return price(make_plan(asked), machine, elsewhere)


def outcomes(case: Case) -> Iterator[Outcome]:
    """One for each fix that a request's findings print, as `kind`: ended, faster, smaller, same or worse."""
    try:
        before = plan_of(case)
    except FindingsError:
        return
    for finding in before.findings:
        if not finding.fix:
            continue
        if "--chips of a shape" in finding.fix:
            larger = request(replace(typed(case, finding.fix), chips=""))
            after, gain = make_plan(replace(larger, chip=read_machine(case.chips).chip)), None
        else:
            after = plan_of(typed(case, finding.fix))
            gain = _gain(before, after)
        yield Outcome(case=case, finding=finding, kind=_kind(finding, before, after, gain), gain=gain)


def wrong_programs(case: Case, plan: Plan) -> Iterator[CompiledProgram]:
    """Programs of a plan with findings that have fixes."""
    assert plan.request.chip is not None
    expert = plan.mesh.shape.get("expert", 1)
    if case.model.startswith("mixtral") and expert > 1:
        of_experts = {
            "all-to-all": (programs.weights_gathered, programs.tokens_gathered),
            "weights": (programs.tokens_exchanged,),
        }
        yield from (program(plan) for program in of_experts.get(plan.request.layout.move_moe, ()))
    if plan.request.microbatches > 1:
        yield programs.same_in_each_iteration(plan)
    yield programs.too_large(plan)
    row = plan.by_name["logits.scores"]
    local = [
        -(-size // plan.mesh.size(row.in_use.axes_of(name)))
        for name, size in zip(row.in_use.logical_axes, row.shape, strict=True)
    ]
    scores = Temporary(
        bytes_per_device=row.bytes_per_device,
        dtype="float32",
        shape=tuple(local),
        op="fusion",
        component="logits",
        phase="backward",
        source=None,
    )
    yield remembered(programs.planned(plan), largest=(scores,), peak_bytes=4 * row.bytes_per_device)


def compiled_outcomes(case: Case) -> Iterator[Outcome]:
    """The same for the findings about programs that were compiled otherwise than planned."""
    try:
        before = plan_of(case)
    except FindingsError:
        return
    machine = read_machine(case.chips)
    for program in wrong_programs(case, before):
        for finding in compiled_findings(before, program, agree(before, program), settling_on(before, machine)):
            if not finding.fix or finding.fix.startswith("pip ") or "--chips of a shape" in finding.fix:
                continue
            after = plan_of(typed(case, finding.fix))
            gain = _gain(before, after)
            kind = _compiled_kind(finding, before, after, gain)
            yield Outcome(case=case, finding=finding, kind=kind, gain=gain)


def _compiled_kind(finding: Finding, before: Plan, after: Plan, gain: float | None) -> str:
    """An error of a program can end where the plan has no other; and what the finding says of the step is what the plan says."""
    effect = finding.effect
    if effect is None or effect.after.bytes_per_device != after.memory.total_bytes_per_device:
        return "worse"
    seconds = None if after.step is None else after.step.seconds
    if seconds is not None and effect.after.seconds != pytest.approx(seconds, rel=1e-9):
        return "worse"
    if finding.severity == "error":
        known = {(one.code, one.tensor, one.where) for one in before.errors}
        return "ended" if {(one.code, one.tensor, one.where) for one in after.errors} <= known else "worse"
    return _kind(finding, before, after, gain)


def _gain(before: Plan, after: Plan) -> float | None:
    if before.step is None or after.step is None:
        return None
    tokens = [plan.request.batch * plan.request.length for plan in (before, after)]
    return 1 - (after.step.seconds / tokens[1]) / (before.step.seconds / tokens[0])


def _kind(finding: Finding, before: Plan, after: Plan, gain: float | None) -> str:
    if finding.severity == "error":
        left = {(one.code, one.tensor, one.where) for one in after.errors}
        return "worse" if (finding.code, finding.tensor, finding.where) in left else "ended"
    smaller = after.memory.total_bytes_per_device - before.memory.total_bytes_per_device
    if gain is not None and gain > 1e-9:
        return "faster"
    if smaller < 0:
        return "smaller"
    return "same" if smaller == 0 and (gain is None or abs(gain) <= 1e-9) else "worse"


def drawn_outcomes(
    count: int, seed: int, of_case: Callable[[Case], Iterator[Outcome]] = outcomes, models: Sequence[str] = MODELS
) -> list[Outcome]:
    draw = random.Random(seed)
    return [outcome for _ in range(count) for outcome in of_case(drawn_case(draw, models))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    asked = parser.parse_args()
    found = drawn_outcomes(asked.count, asked.seed, compiled_outcomes if asked.compiled else outcomes)
    for (code, kind), number in sorted(Counter((one.finding.code, one.kind) for one in found).items()):
        gains = [one.gain for one in found if (one.finding.code, one.kind) == (code, kind) and one.gain is not None]
        saved = f"  a token's time changes by {-median(gains):+.1%} (median)" if gains else ""
        print(f"{code}  {kind:<8} {number:>4}{saved}")
    for one in found:
        if one.kind == "worse":
            print(one.case, one.finding.text(), sep="\n")


if __name__ == "__main__":
    main()
