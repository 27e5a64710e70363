"""A step without devices: the real model, step and optimizer, as one rank of a fake process group, without values.

Only the shapes of tensors are known, so each expert is assumed to get the same number of rows. Everything else is what a rank
would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan, routed_evenly
from shardwright.engine_torch.dry_run.imagined import Imagined, imagined_model, imagined_step
from shardwright.engine_torch.dry_run.stages import RankRun, run_ranks
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.io.private import imagined_ranks

MICROBATCHES = 2
"""At most this many are run: the first, and the last one, which sums over replicas. All others are like the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Imagined):
    """What a rank does in a step: its collectives, and how often each; its bytes at rest, and its peak memory.

    ``peak_bytes``: weights, gradients, moments, averages, the batch and all activations, without what an allocator or a
    kernel needs in addition. ``even``: all experts were assumed to get the same number of rows.

    ``planned_even_bytes``: what the plan has for the same where all experts get the same number of rows, if that is less.

    ``ranks``: of a pipeline, all ranks. The collectives are then those of the rank that computes the longest, the bytes those of the
    rank that the plan has for the fullest.
    """

    even: bool
    planned_even_bytes: int | None = None
    ranks: Sequence[RankRun] = ()


def dry_run(plan: Plan) -> DryRun:
    """One step of ``plan`` on the first rank of its mesh, or, of a pipeline, on the first of each of its ranks. No other rank exists,
    and nothing is computed.

    Raises FindingsError for a plan with errors.
    """
    require_lowered(plan)
    if plan.pipeline is not None:
        ranks = run_ranks(plan, plan.pipeline)
        fullest = ranks[plan.pipeline.fullest].found
        return _found(plan, replace(fullest, collectives=ranks[plan.pipeline.slowest].found.collectives), ranks)
    num = plan.request.microbatches
    run = min(num, MICROBATCHES)
    rows = plan.request.batch * run // num
    shorter = make_plan(replace(plan.request, microbatches=run, batch=rows))
    with imagined_ranks(plan.mesh.num_devices):
        ranks = ranks_of(shorter, torch.device("cpu"))
        found = imagined_step(imagined_model(shorter, ranks), rows)
    collectives = tuple(
        (one, count * num // run if one.phase not in (None, "update") else count) for one, count in found.collectives
    )
    return _found(plan, replace(found, collectives=collectives, batch_bytes=found.batch_bytes * num // run))


def _found(plan: Plan, found: Imagined, ranks: Sequence[RankRun] = ()) -> DryRun:
    architecture, even = plan.request.table.architecture, routed_evenly(plan)
    return DryRun(
        **{one.name: getattr(found, one.name) for one in fields(Imagined)},
        even=any(stack.experts for stack in architecture.stacks),
        planned_even_bytes=None if even is plan else even.memory.total_bytes_per_device,
        ranks=[_beside_even(one, even) for one in ranks] if even is not plan else ranks,
    )


def _beside_even(one: RankRun, even: Plan) -> RankRun:
    assert even.pipeline is not None
    return replace(one, planned_even_bytes=even.pipeline.total_bytes(one.rank))
