"""Runs of a case on ranks, assembled in the form of the JAX engine's runs, for the same comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import OPTIONS, Case, Run, assert_same, batches_of, in_row_order, plan_of
from tests.engine_torch.faults import train_with
from tests.engine_torch.ranks import Ranks, one_answer
from tests.engine_torch.training import COMPARED_STEPS, NamedBox, RankRun, train


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """``initial``: the full state before the first step, by the tensors' names in a checkpoint. ``dropped``: the assignments
    above an expert's capacity, in all steps."""

    run: Run
    dropped: int
    initial: Mapping[str, np.ndarray]


RunAlone = Callable[[Case], RanksRun]
"""The first steps of a case on one device."""


def torch_plan(case: Case, **changed: Any) -> Plan:
    """The plan of a case for PyTorch; ``changed``: what else is requested."""
    plan = make_plan(replace(plan_of(case).request, engine="torch", **changed))
    assert not plan.errors, plan.errors
    return plan


def trained(ranks: Ranks, case: Case, num_steps: int = COMPARED_STEPS, **changed: Any) -> RanksRun:
    """The first steps of a case; the ranks are those of its mesh."""
    return trained_on(ranks, torch_plan(case, **changed), batches_of(case)[:num_steps], case.seed)


def trained_on(
    ranks: Ranks,
    plan: Plan,
    batches: Sequence[Batch],
    seed: int,
    fault: str = "",
    *,
    checked: bool = True,
    options: OptimizerOptions = OPTIONS,
) -> RanksRun:
    """A step of a plan on each of the batches. All ranks must return the same metrics, and replicas must have the same bits.

    ``fault``: one of ``faults.py``, on every rank; ``checked`` False: ranks need not agree. The metrics of the first rank are
    then compared with one device.
    """
    function = partial(train_with, fault) if fault else train
    runs: list[RankRun] = ranks.run(
        function, plan, seed, options, [dict(in_row_order(batch, plan)) for batch in batches]
    )
    steps = runs[0].steps
    if checked:
        assert one_answer([one.steps for one in runs])
        assert all(step.overflow == 0 for step in steps)
        _assert_same_replicas(runs)
    run = Run(
        losses=np.asarray([step.loss for step in steps]),
        norms=np.asarray([step.grad_norm for step in steps]),
        tokens=np.asarray([step.tokens for step in steps]),
        gradients=tuple(assembled(boxes) for boxes in zip(*(one.gradients for one in runs), strict=True)),
    )
    return RanksRun(
        run=run, dropped=sum(step.dropped for step in steps), initial=assembled([one.initial for one in runs])
    )


def assert_trains_as(theirs: RanksRun, ranks: Ranks, case: Case, **changed: Any) -> None:
    """The first steps of a case are those of another run: losses, gradients and what was dropped."""
    ours = trained(ranks, case, **changed)
    assert_same(ours.run, theirs.run, case.tolerance)
    assert ours.dropped == theirs.dropped
    # A capacity that drops nothing would test nothing.
    assert (ours.dropped > 0) == ("capacity_factor" in case.settings)


def in_words(case: Case) -> str:
    return f"{case.model} {case}"


def assembled(boxes_of_ranks: Sequence[Sequence[NamedBox]]) -> dict[str, np.ndarray]:
    """Full tensors from the boxes of all ranks, which have every element once."""
    by_name: dict[str, list[tuple[Box, np.ndarray]]] = {}
    for name, box, array in chain.from_iterable(boxes_of_ranks):
        by_name.setdefault(name, []).append((box, array))
    return {name: _full(name, boxes) for name, boxes in by_name.items()}


def _full(name: str, boxes: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
    shape = tuple(max(stops) for stops in zip(*(box.stop for box, _ in boxes), strict=True))
    array, times = np.zeros(shape, np.float32), np.zeros(shape, np.int8)
    for box, values in boxes:
        array[box.slices] = values
        times[box.slices] += 1
    assert np.all(times == 1), f"{name}: elements that no rank, or more than one, has"
    return array


def _assert_same_replicas(runs: Sequence[RankRun]) -> None:
    # In a pipeline a rank has the weights of its stages.
    for key in {key for one in runs for key in one.digests}:
        by_box: dict[Box | None, set[str]] = {}
        for one in runs:
            if key in one.digests:
                box, digest = one.digests[key]
                by_box.setdefault(box, set()).add(digest)
        assert all(len(digests) == 1 for digests in by_box.values()), f"{key}: replicas differ"
