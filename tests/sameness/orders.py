"""Measures the bounds of bounds.py: how much orders of summation differ from each other, and how much layouts and engines do.

    python -m tests.sameness.orders [--seeds 6]

Writes docs/sameness-bfloat16.md; fails where a difference is above its bound.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.core.planning import make_plan
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.steps import Run
from tests.sameness.bounds import OF_GRADIENTS, OF_LOSS, ORDERS, Bound, bound_from, shares
from tests.sameness.other_order import PARTS, runs
from tests.sameness.test_bfloat16 import CASES, ROWS, VOCAB, alone_of, one_device, request_of, trained

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

The covering set that `make test` trains on JAX, compared with one device, and one device of each engine compared with the other.

| model | what | largest share of a gradient | of | largest share of a loss |
|---|---|---:|---|---:|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    models = sorted({(case.model, case.more) for case in CASES})
    lines, largest = [HEAD], 0.0
    for model, more in models:
        line, most = orders_line(model, more, options.seeds)
        largest = max(largest, most)
        lines.append(line)
        print(line, end="", flush=True)
    lines.append(LAYOUTS)
    for model, more in models:
        on_jax, on_torch, bound = one_device(model, more)
        pairs = [("JAX and PyTorch" + (f", {more}" if more else ""), on_jax, on_torch, bound)]
        pairs += [
            (str(case).removeprefix(model).strip(), trained(make_plan(request_of(case))), on_jax, bound)
            for case in CASES
            if (case.model, case.more) == (model, more)
        ]
        for what, ours, theirs, allowed in pairs:
            line, most = compared(model, what, ours, theirs, allowed)
            largest = max(largest, most)
            lines.append(line)
            print(line, end="", flush=True)
        jax.clear_caches()
    PAGE.write_text("".join(lines), encoding="utf-8")
    return 1 if largest > 1 else 0


def orders_line(model: str, more: str, seeds: int) -> tuple[str, float]:
    request = request_of(alone_of(model, more))
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
        f"| {model} | {more} | {seeds} | {seeds * MORE} | {max(of_gradients):.2f} | {np.median(of_gradients):.2f} | "
        f"{max(of_losses):.2f} | {min(gradients):.1e} to {max(gradients):.1e} | {min(losses):.1e} to {max(losses):.1e} |\n"
    )
    return line, max(*of_gradients, *of_losses)


def compared(model: str, what: str, ours: Run, theirs: Run, bound: Bound) -> tuple[str, float]:
    found = shares(bound, ours, theirs)
    loss = found.pop("loss")
    weight = max(found, key=found.__getitem__)
    return f"| {model} | {what} | {found[weight]:.2f} | {weight} | {loss:.2f} |\n", max(loss, found[weight])


if __name__ == "__main__":
    sys.exit(main())
