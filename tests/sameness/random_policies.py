"""Trains random policies of recomputation under random layouts, compares them with one device, and writes their section of
docs/sameness.md.

    python -m tests.sameness.random_policies [--seed 16] [--count 20]

Each layout is one of ``random_layouts.py``; JAX and PyTorch alternate.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import replace

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.core.model.table import ModelTable
from shardwright.core.planning import make_plan
from shardwright.core.policies.policy import BASES, CHANGES, INPUT, WEIGHTS, read_policy
from shardwright.core.policies.runs import names_that_are_kept, stacks_of
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.sameness.page import PAGE, with_section
from tests.sameness.random_layouts import Drawn, draw
from tests.sameness.random_runs import AgainstOneDevice, on_jax, on_ranks

TITLE = "Policies drawn at random"
SEED, COUNT = 16, 20
MOST = {"jax": 8, "torch": 8}
MORE_LAYERS = {"num_layers=1": "num_layers=3", "num_layers=2": "num_layers=4"}
"""So that some layers can keep other things than others."""


def random_policy(dice: random.Random, table: ModelTable) -> str:
    """A policy that the model has: of all layers, of a stack and the others, or of a slice and the others."""
    stacks = {name: num for name, _, num in stacks_of(table)}
    kind = dice.choice(("all", "all", "stack", "slice"))
    if kind == "all":
        return _part(dice, table, list(stacks))
    if kind == "stack" and len(stacks) > 1:
        stack = dice.choice(list(stacks))
        others = [name for name in stacks if name != stack]
        return f"{_part(dice, table, [stack])}@{stack}+{_part(dice, table, others)}"
    layers = dice.choice(("0", "::2", ":1", f"{table.num_layers - 1}:"))
    # Names that each of the layers has.
    common = [name for name in names_that_are_kept(table, list(stacks)) if _in_all(table, stacks, name)]
    return f"{_of_names(dice, common)}@{layers}+{_part(dice, table, list(stacks))}"


def _in_all(table: ModelTable, stacks: dict[str, int], name: str) -> bool:
    return all(name in names_that_are_kept(table, [stack]) for stack in stacks)


def _part(dice: random.Random, table: ModelTable, stacks: list[str]) -> str:
    return _of_names(dice, names_that_are_kept(table, stacks))


def _of_names(dice: random.Random, known: list[str]) -> str:
    base = dice.choice(BASES)
    names = dice.sample(known, dice.randint(1, 5))
    given: dict[str, list[str]] = {}
    for name in names:
        allowed = [how for how in CHANGES if (how, name) not in (("recompute", INPUT), ("host", WEIGHTS))]
        given.setdefault(dice.choice(allowed), []).append(name)
    return ",".join([base, *(f"{how}={','.join(each)}" for how, each in given.items())])


def drawn(seed: int, number: int) -> Drawn:
    """A layout with a policy that its plan has no error under."""
    dice = random.Random(f"policies {seed} {number}")
    one = draw(seed, number, most=MOST)
    model = one.model._replace(dimensions=MORE_LAYERS[one.model.dimensions[:12]] + one.model.dimensions[12:])
    while True:
        plan = make_plan(replace(one.plan.request, table=model.table, remat=random_policy(dice, model.table)))
        if not plan.errors:
            return replace(one, model=model, plan=plan)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={MOST['jax']}"
    ranks = Ranks(MOST["torch"], in_group, 900.0)
    against, rows, failed = AgainstOneDevice(jax=on_jax, torch=on_ranks(ranks)), [], 0
    try:
        for number in range(options.count):
            one = drawn(options.seed, number)
            policy = read_policy(one.plan.request.remat).text
            try:
                apart = against.assert_same(one).difference
            except Exception as error:  # Each is reported, and the next one is trained.
                print(f"not the same: {one.text}\n  {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            rows.append(
                f"| {number} | {one.engine} | {one.family} | {one.plan.mesh} | `{policy}` | {apart.loss:.1e} | {apart.gradient:.1e} |"
            )
            print(rows[-1], flush=True)
    finally:
        ranks.end()
    if not failed and options.count >= COUNT:
        text = f"""{options.count} of seed {options.seed} (`python -m tests.sameness.random_policies --seed {options.seed}`), each for two steps under a layout drawn as
[those](#layouts-drawn-at-random) of all roles, compared with one device of the same engine, which keeps all.

| number | engine | family | mesh | `--remat` | loss | gradient |
|---:|---|---|---|---|---:|---:|
""" + "\n".join(rows)
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLE, text), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
