"""Role tables that nobody wrote, on ranks beside one device: each that the planner has no fault to find with.

python -m tests.engine_torch.random_layouts [--first 0] [--count 100]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

# The environment of the tests.
import tests.conftest  # noqa: F401
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.steps import Run, assert_same
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.sameness.random_layouts import ROWS, VOCAB, Model, random_plan

TOLERANCE = 1e-4
"""Of a loss, relative, as for the families with experts."""


def torch_layout(seed: int) -> tuple[Plan, Model] | None:
    """The plan of a seed for PyTorch; None where there is none, or it is refused."""
    if (found := random_plan(seed)) is None:
        return None
    plan, of = found
    plan = make_plan(replace(plan.request, engine="torch"))
    return None if plan.errors else (plan, of)


class Alone:
    """The first two steps of each model on one device, made once."""

    def __init__(self, one: Ranks) -> None:
        self._one = one
        self._runs: dict[Model, Run] = {}

    def run(self, plan: Plan, of: Model) -> Run:
        if of not in self._runs:
            sizes = dict.fromkeys(plan.mesh.names, 1)
            request = replace(plan.request, mesh_sizes=sizes, micro_steps=1, load_balanced=False)
            self._runs[of] = two_steps(self._one, make_plan(request))
        return self._runs[of]


def two_steps(ranks: Ranks, plan: Plan) -> Run:
    return trained_on(ranks, plan, [tokens_of(number, ROWS, VOCAB) for number in (0, 1)], seed=0).run


def assert_trains_as_alone(ranks: Mapping[int, Ranks], alone: Alone, plan: Plan, of: Model) -> None:
    assert_same(two_steps(ranks[plan.mesh.num_devices], plan), alone.run(plan, of), TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    ranks = {num: Ranks(num, in_group) for num in (1, 2, 4, 8)}
    alone = Alone(ranks[1])
    held = failed = 0
    for seed in range(given.first, given.first + given.count):
        if (found := torch_layout(seed)) is None:
            continue
        plan, of = found
        held += 1
        try:
            assert_trains_as_alone(ranks, alone, plan, of)
        except Exception as error:  # Whatever it is, it is told and the next one tried.
            failed += 1
            roles = {axis: dict(entry.roles) for axis, entry in plan.request.layout.entries.items()}
            print(f"seed {seed}: {type(error).__name__}: {error}\n  {of}\n  {plan.mesh} {roles}", flush=True)
    for pool in ranks.values():
        pool.end()
    print(f"{held} layouts, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
