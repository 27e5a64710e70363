"""Runs of a case by ranks, put together, in the form in which the JAX engine's are: for the same comparisons."""

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
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import OPTIONS, Case, Run, assert_same, batches_of, in_row_order, plan_of
from tests.engine_torch.faults import train_with
from tests.engine_torch.ranks import Ranks, one_answer
from tests.engine_torch.training import LOOKED_AT, Part, Told, train


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """``initial``: the state before the first step, whole, by the name that a checkpoint gives a tensor. ``dropped``: by
    capacities, in all steps."""

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


def trained(ranks: Ranks, case: Case, num_steps: int = LOOKED_AT, **changed: Any) -> RanksRun:
    """The first steps of a case; the ranks are those of its mesh."""
    return trained_on(ranks, torch_plan(case, **changed), batches_of(case)[:num_steps], case.seed)


def trained_on(
    ranks: Ranks, plan: Plan, batches: Sequence[Batch], seed: int, fault: str = "", *, checked: bool = True
) -> RanksRun:
    """A step of a plan on each of the batches. All ranks must tell the same, and replicas hold the same bits.

    ``fault``: one of ``faults.py``, in every rank; ``checked`` False: they need not agree. What the first of them tells
    is then taken, to be held against one device.
    """
    way = partial(train_with, fault) if fault else train
    told: list[Told] = ranks.run(way, plan, seed, OPTIONS, [dict(in_row_order(batch, plan)) for batch in batches])
    steps = told[0].steps
    if checked:
        assert one_answer([one.steps for one in told])
        assert all(step.overflow == 0 for step in steps)
        _assert_same_replicas(told)
    run = Run(
        losses=np.asarray([step.loss for step in steps]),
        norms=np.asarray([step.grad_norm for step in steps]),
        tokens=np.asarray([step.tokens for step in steps]),
        gradients=tuple(_whole(parts) for parts in zip(*(one.gradients for one in told), strict=True)),
    )
    return RanksRun(run=run, dropped=sum(step.dropped for step in steps), initial=_whole([one.initial for one in told]))


def assert_trains_as(theirs: RanksRun, ranks: Ranks, case: Case, **changed: Any) -> None:
    """The first steps of a case are those of another run: losses, gradients and what was dropped."""
    ours = trained(ranks, case, **changed)
    assert_same(ours.run, theirs.run, case.tolerance)
    assert ours.dropped == theirs.dropped
    # A capacity that drops nothing would say nothing.
    assert (ours.dropped > 0) == ("capacity_factor" in case.settings)


def in_words(case: Case) -> str:
    return f"{case.model} {case}"


def _whole(parts_of_ranks: Sequence[Sequence[Part]]) -> dict[str, np.ndarray]:
    """Tensors of the boxes of all ranks, which hold every element once."""
    boxes: dict[str, list[tuple[Box, np.ndarray]]] = {}
    for name, box, array in chain.from_iterable(parts_of_ranks):
        boxes.setdefault(name, []).append((box, array))
    return {name: _put_together(name, parts) for name, parts in boxes.items()}


def _put_together(name: str, parts: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
    shape = tuple(max(stops) for stops in zip(*(box.stop for box, _ in parts), strict=True))
    array, times = np.zeros(shape, np.float32), np.zeros(shape, np.int8)
    for box, part in parts:
        array[box.slices] = part
        times[box.slices] += 1
    assert np.all(times == 1), f"{name}: elements that no rank, or more than one, has"
    return array


def _assert_same_replicas(told: Sequence[Told]) -> None:
    for key in told[0].digests:
        by_box: dict[Box | None, set[str]] = {}
        for one in told:
            box, digest = one.digests[key]
            by_box.setdefault(box, set()).add(digest)
        assert all(len(digests) == 1 for digests in by_box.values()), f"{key}: replicas differ"
