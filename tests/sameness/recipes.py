"""How much layouts and engines differ from one device under each recipe of low precision: ``python -m tests.sameness.recipes``
measures it again and writes docs/sameness-fp8.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "sameness-fp8.md"

INTRODUCTION = """\
# How much layouts differ under a recipe

Under every recipe that both engines run ([fp8.md](fp8.md)), two steps of the test models under a layout, compared with one device of
PyTorch: the relative difference of each loss, and the largest of a weight's gradient in step 1 relative to its norm, with the
weight. The computation is in float32. In `mixtral-test` every token is assigned to all experts.

Codes are equal where their amaxes and their elements are. Elements are results of other products, which another layout or engine
sums in another order, so now and then a last bit decides between two codes, which are up to a quarter apart. Where no sum has
another order, as on PyTorch under `fsdp`, nothing else differs. The largest differences are of keys and queries in the first step,
whose gradients are small differences of large numbers. `free`: what the plan says of all operands.

`python -m tests.sameness.recipes` measures again and writes this page; `tests/engine_torch/test_low_precision.py` compares the
same cases.

| recipe | model | layout | free | engine | loss 1 | loss 2 | gradient | of |
|---|---|---|---|---|---:|---:|---:|---|
"""


def rows() -> Iterator[str]:
    from tests.engine_jax.steps import Case, Run, run_of
    from tests.engine_torch.meeting import in_group
    from tests.engine_torch.ranks import Ranks
    from tests.engine_torch.runs import torch_plan, trained
    from tests.engine_torch.test_low_precision import CASES
    from tests.engine_torch.training import COMPARED_STEPS
    from tests.sameness.bounds import gradients_apart, losses_apart

    four = Ranks(4, in_group)
    alone: Callable[[Case], Run] = cache(lambda case: trained(four.first(1), case).run)
    try:
        for case in CASES:
            free = "yes" if all(weight.free for weight in torch_plan(case).quantized) else "no"
            expected = alone(case.alone)
            for engine, run in (("PyTorch", trained(four, case).run), ("JAX", run_of(case, COMPARED_STEPS))):
                first, second = losses_apart(run, expected)
                gradients = gradients_apart(run, expected)[0]
                weight = max(gradients, key=gradients.__getitem__)
                yield (
                    f"| `{case.precision}` | {case.model} | {case.layout}, {case.mesh} | {free} | {engine} | {first:.1e} | "
                    f"{second:.1e} | {gradients[weight]:.1e} | {weight} |\n"
                )
    finally:
        four.end()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = []
    for line in rows():
        print(line, end="", flush=True)
        lines.append(line)
    PAGE.write_text(INTRODUCTION + "".join(lines), encoding="utf-8")
