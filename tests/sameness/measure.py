"""A case compared with one device, in numbers: losses, gradients, and the experts that tokens are assigned to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from shardwright.engine_jax.training.state import State
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import (
    FEW_STEPS,
    Case,
    Difference,
    Run,
    batches_of,
    compile_plan,
    compiled_step,
    difference,
    plan_of,
    row_order,
    run_plan,
)
from tests.sameness.assignments import ExpertAssignments, assignments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Over all steps: the smallest margin of an assignment on one device, the number of token-expert assignments, and how many of
    them differ."""

    margin: float
    assignments: int
    flipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A run, and the assignments of its tokens before each step; none without experts."""

    run: Run
    assigned: tuple[ExpertAssignments, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How much a case differs from one device."""

    case: Case
    difference: Difference
    routing: Routing | None


def watched(case: Case) -> Watched:
    """All steps of a case, with the rows in the order of the text."""
    return watched_on(case, compile_plan(plan_of(case), level=1), batches_of(case))


def watched_on(case: Case, step: jax.stages.Compiled, batches: Sequence[Batch]) -> Watched:
    """A step of a case on each of the batches."""
    plan = plan_of(case)
    if not case.experts:
        return Watched(run=run_plan(plan, step, batches, case.seed))
    assign, in_text = assignments_of(plan), np.argsort(row_order(plan))
    assigned: list[ExpertAssignments] = []

    def watch(state: State, batch: Batch) -> None:
        experts_NBLK, margins_NBL = assign(state, batch)
        assigned.append(ExpertAssignments(experts_NBLK[:, :, in_text], margins_NBL[:, :, in_text]))

    return Watched(run=run_plan(plan, step, batches, case.seed, watch), assigned=tuple(assigned))


@lru_cache(maxsize=2)
def watched_alone(case: Case) -> Watched:
    """The same, cached for the cases that are compared with it."""
    return watched(case)


def measured(case: Case) -> tuple[Measured, Watched, Watched]:
    """A case compared with one device, and both runs."""
    ours, theirs = watched(case), watched_alone(case.alone)
    routing = routing_of(batches_of(case), ours.assigned, theirs.assigned) if case.experts else None
    return Measured(case=case, difference=difference(ours.run, theirs.run), routing=routing), ours, theirs


def assert_same_assignments(case: Case) -> None:
    """In the first steps, every token of a document is assigned to the same experts as on one device; the smallest margin is
    printed."""
    batches = batches_of(case, FEW_STEPS)
    ours, theirs = (watched_on(one, compiled_step(one), batches).assigned for one in (case, case.alone))
    routing = routing_of(batches, ours, theirs)
    print(
        f"{case}: smallest margin {routing.margin:.1e}, {routing.flipped} of {routing.assignments} assignments flipped"
    )
    # With this seed no token is too near to a tie: a flipped assignment is a fault.
    assert routing.margin > 1e-6
    assert routing.flipped == 0


def routing_of(
    batches: Sequence[Batch], ours: Sequence[ExpertAssignments], theirs: Sequence[ExpertAssignments]
) -> Routing:
    """The assignments of the tokens of documents; padding goes to no expert."""
    margin, assignments, flipped = np.inf, 0, 0
    for batch, our, their in zip(batches, ours, theirs, strict=True):
        of_text = np.broadcast_to(batch["segments"] > 0, their.margins_NBL.shape)
        our_NK, their_NK = our.experts_NBLK[of_text], their.experts_NBLK[of_text]
        margin = min(margin, float(their.margins_NBL[of_text].min()))
        assignments += their_NK.size
        flipped += their_NK.size - int((our_NK[:, :, None] == their_NK[:, None, :]).sum())
    return Routing(margin=margin, assignments=assignments, flipped=flipped)
