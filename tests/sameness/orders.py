"""Measures what bounds.py allows: how far orders of summing are from each other, and layouts and engines beside them.

    python -m tests.sameness.orders [--seeds 6]

Writes docs/sameness-bfloat16.md; ends with an error where something is further apart than its bound.
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
from tests.sameness.bounds import OF_GRADIENTS, OF_LOSS, ORDERS, Bound, around, shares
from tests.sameness.other_order import PARTS, runs
from tests.sameness.test_bfloat16 import CASES, ROWS, VOCAB, alone_of, one_device, request_of, trained

PAGE = Path(__file__).parent.parent.parent / "docs" / "sameness-bfloat16.md"
MORE = 4
"""Orders beside those that make the bound, to be held against it."""

HEAD = f"""# How far layouts may be apart in bfloat16

Law 3 is that a layout changes no numbers. In bfloat16 it is: two layouts differ by no more than two orders of summing the same
numbers do. How far orders differ is measured, for the very model, rows and initial values that layouts are compared with, on one
device: its first two steps as they are written, and {ORDERS} times with every sum made otherwise.

- Each product of a step, forward and backward, is made in {PARTS} parts of its contracted dim, drawn at random, as `tensor` cuts it.
  Parts are rounded to bfloat16 and added in it, as they would be sent; those of a weight's gradient are added in float32, as
  devices add theirs ([precision.md](precision.md)). Attention goes over {PARTS} pieces of the keys, as around a ring.
- A gradient of a weight in a layer may differ by |g - g1| / |g1| up to {OF_GRADIENTS:g} times the largest of these {ORDERS}, a loss by
  up to {OF_LOSS:g} times the root of their mean square: a gradient's difference is nearly the same in every order, a loss is one
  number, whose difference is small by chance now and then.
- Models with experts have all experts chosen: a token between two experts is another token.

`python -m tests.sameness.orders` measures again and writes this page; `tests/sameness/bounds.py` makes the bound of any request.

## Orders

Other orders than those that made the bound, as shares of it: the largest of all weights, steps and orders, and the median.

| model | more | initial values | orders held | largest share of a gradient | median | largest share of a loss | a gradient may differ by | a loss by |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""

LAYOUTS = """
## Layouts and engines

The covering set that `make test` trains on JAX beside one device, and one device of each engine beside the other's.

| model | what | largest share of a gradient | of | largest share of a loss |
|---|---|---:|---|---:|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=6)
    given = parser.parse_args()
    models = sorted({(case.model, case.more) for case in CASES})
    lines, largest = [HEAD], 0.0
    for model, more in models:
        line, most = orders_line(model, more, given.seeds)
        largest = max(largest, most)
        lines.append(line)
        print(line, end="", flush=True)
    lines.append(LAYOUTS)
    for model, more in models:
        on_jax, on_torch, bound = one_device(model, more)
        pairs = [("JAX beside PyTorch" + (f", {more}" if more else ""), on_jax, on_torch, bound)]
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
        whole, *others = runs(request, batches, seed, ORDERS + MORE)
        bound = around(whole, others[:ORDERS])
        bounds.append(bound)
        for other in others[ORDERS:]:
            found = shares(bound, other, whole)
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
