"""Measures the bounds of bounds.py: how much orders of summation differ from each other, and how much layouts and engines do.

    python -m tests.sameness.orders [--seeds 6]

Writes docs/sameness-bfloat16.md; fails where a difference is above its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.core.planning import make_plan
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.steps import Run
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.engine_torch.test_bfloat16 import CASES as OF_TORCH
from tests.engine_torch.test_bfloat16 import of_torch
from tests.sameness.bounds import OF_GRADIENTS, OF_LOSS, ORDERS, Bound, bound_from, shares
from tests.sameness.other_order import PARTS, runs
from tests.sameness.test_bfloat16 import BATCHES, CASES, ROWS, SEED, VOCAB, Case, one_device, request_of, trained

PAGE = Path(__file__).parent.parent.parent / "docs" / "sameness-bfloat16.md"
MORE = 4
"""Orders in addition to those that make the bound, to be compared with it."""

HEAD = f"""# How much layouts may differ in bfloat16

Law 3 says that a layout changes no numbers. In bfloat16 this means: two layouts differ by no more than two orders of summation of
the same numbers. The difference between orders is measured on one device, with the same model, rows and initial values with which
layouts are compared: its first two steps in the order of the program, and {ORDERS} times with all sums in another order.

- Each product of a step, forward and backward, is divided into {PARTS} random parts of its contracted dim, as `tensor` shards it.
  Their results are rounded to bfloat16 and summed in bfloat16, as a collective does; those of a weight's gradient are summed in
  float32, as devices sum theirs ([precision.md](precision.md)). Attention takes {PARTS} chunks of the keys in turn, as in a ring.
- A gradient of a weight in a layer may differ by |g - g1| / |g1| up to {OF_GRADIENTS:g} times the largest difference of these {ORDERS},
  a loss by up to {OF_LOSS:g} times their root mean square. A gradient's difference is nearly the same in every order; a loss is one
  number, whose difference is sometimes small by chance.
- In models with experts, every token is assigned to all experts: otherwise rounding could change the expert of a token.

`python -m tests.sameness.orders` measures again and writes this page; `tests/sameness/bounds.py` makes the bound of any request.

## Orders

Orders other than those that made the bound, as shares of it: the largest of all weights, steps and orders, and the median.

| model | more | initial values | orders compared | largest share of a gradient | median | largest share of a loss | a gradient may differ by | a loss by |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""

LAYOUTS = """
## Layouts and engines

Layouts on both engines, compared with one device, and one device of each engine compared with the other. `weights_dtype` and
`moments_dtype`: what rests is narrow; `master_dtype`, `gradients_dtype`: a step adds to float32 master weights, from float32 gradients.

| model | engine | what | largest share of a gradient | of | largest share of a loss |
|---|---|---|---:|---|---:|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    lines, largest = [HEAD], 0.0
    every = sorted({case.alone for case in (*CASES, *OF_TORCH)}, key=str)
    for alone in every:
        line, most = orders_line(alone, options.seeds)
        largest = max(largest, most)
        lines.append(line)
        print(line, end="", flush=True)
    lines.append(LAYOUTS)
    four = Ranks(4, in_group)
    try:
        for alone in every:
            for engine, what, ours, theirs, bound in pairs_of(alone, four):
                line, most = compared(alone.model, engine, what, ours, theirs, bound)
                largest = max(largest, most)
                lines.append(line)
                print(line, end="", flush=True)
            jax.clear_caches()
    finally:
        four.end()
    PAGE.write_text("".join(lines), encoding="utf-8")
    return 1 if largest > 1 else 0


def pairs_of(alone: Case, four: Ranks) -> Iterator[tuple[str, str, Run, Run, Bound]]:
    """Engine, what it is, both runs, and what they may differ by."""
    on_jax, on_torch, bound = one_device(alone)
    yield "both", text_of(alone, "one device"), on_jax, on_torch, bound
    for case in CASES:
        if case.alone == alone:
            yield "JAX", text_of(case, case.layout), trained(make_plan(request_of(case))), on_jax, bound
    for case in OF_TORCH:
        if case.alone == alone:
            run = trained_on(four, make_plan(of_torch(request_of(case))), BATCHES, SEED).run
            yield "PyTorch", text_of(case, case.layout), run, on_torch, bound


def text_of(case: Case, what: str) -> str:
    more = [case.more, *(f"{key}={value}" for key, value in (*case.move, *case.options))]
    return ", ".join(one for one in (what, *more) if one)


def orders_line(alone: Case, seeds: int) -> tuple[str, float]:
    request, more = request_of(alone), text_of(alone, "")
    of_gradients, of_losses, bounds = [], [], []
    for seed in range(seeds):
        batches = [tokens_of(2 * seed + step, ROWS, VOCAB) for step in range(2)]
        reference, *others = runs(request, batches, seed, ORDERS + MORE)
        bound = bound_from(reference, others[:ORDERS])
        bounds.append(bound)
        for other in others[ORDERS:]:
            found = shares(bound, other, reference)
            of_losses.append(found.pop("loss"))
            of_gradients += found.values()
    gradients = [share for one in bounds for step in one.gradients for share in step.values()]
    losses = [allowed for one in bounds for allowed in one.losses]
    line = (
        f"| {alone.model} | {more} | {seeds} | {seeds * MORE} | {max(of_gradients):.2f} | {np.median(of_gradients):.2f} | "
        f"{max(of_losses):.2f} | {min(gradients):.1e} to {max(gradients):.1e} | {min(losses):.1e} to {max(losses):.1e} |\n"
    )
    return line, max(*of_gradients, *of_losses)


def compared(model: str, engine: str, what: str, ours: Run, theirs: Run, bound: Bound) -> tuple[str, float]:
    found = shares(bound, ours, theirs)
    loss = found.pop("loss")
    weight = max(found, key=found.__getitem__)
    return f"| {model} | {engine} | {what} | {found[weight]:.2f} | {weight} | {loss:.2f} |\n", max(loss, found[weight])


if __name__ == "__main__":
    sys.exit(main())
