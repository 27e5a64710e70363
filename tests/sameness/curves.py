"""Losses of 100 steps under each recipe of low precision, beside those of bfloat16: ``python -m tests.sameness.curves`` trains all of
them, stores their losses in ``curves.json``, and writes docs/curves-fp8.md with its plot; fails where a final loss is farther from
bfloat16's than ``ALLOWED``.

    python -m tests.sameness.curves [--only TEXT] [--missing] [--page]

The text is the source of Python's standard library as bytes, what ``shardwright train`` reads by default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.core.engines.engines import Engine
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.resolution.request import Request
from shardwright.data import Batches, ByteTokenizer, Rows, read_corpus
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import compile_plan, recipe_of, run_plan
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.sameness.recipe_cases import LLAMA3, MIXTRAL

FILE = Path(__file__).parent / "curves.json"
BFLOAT16 = "bfloat16"
RECIPES = (BFLOAT16, *PRESETS)
STEPS, ROWS, LENGTH, SEED = 100, 8, 64, 0
OPTIONS = OptimizerOptions(lr=3e-4, warmup=10, steps=STEPS, weight_decay=0.1, clip=1.0)
WIDTHS = {
    "num_layers": "2",
    "embed": "128",
    "num_heads": "8",
    "num_kv_heads": "8",
    "head_dim": "32",
    "mlp": "256",
    "vocab": "260",
}
SIZES: Mapping[str, Mapping[str, str]] = {LLAMA3: WIDTHS, MIXTRAL: {**WIDTHS, "num_experts": "4", "top_k": "2"}}
"""A shard of `tensor` 2 ends with a block of 128; the vocabulary is that of bytes."""
ALLOWED = 0.01
"""Of the loss of the last step, relative."""
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``fsdp-tp`` on a mesh, on an engine. ``title``: for people."""

    title: str
    mesh: Mapping[str, int]
    engine: Engine

    @property
    def devices(self) -> int:
        found = 1
        for size in self.mesh.values():
            found *= size
        return found


LAYOUTS = (
    Layout(title="TP x FSDP2", mesh={"data": 1, "fsdp": 2, "tensor": 2}, engine="torch"),
    Layout(title="HSDP x TP", mesh={"data": 2, "fsdp": 2, "tensor": 2}, engine="jax"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run. ``recipe``: a preset, or ``bfloat16``, in which all else is computed under a recipe too."""

    model: str
    layout: Layout
    recipe: str

    def __str__(self) -> str:
        return f"{self.model} {self.layout.title} {self.recipe}"


CURVES = tuple(
    Curve(model=model, layout=layout, recipe=recipe) for layout in LAYOUTS for model in SIZES for recipe in RECIPES
)

Losses = list[float]


def plan_of(one: Curve) -> Plan:
    plan = make_plan(
        Request(
            layout=load_layout("fsdp-tp"),
            table=build(one.model, SIZES[one.model]),
            batch=ROWS,
            length=LENGTH,
            mesh_sizes=one.layout.mesh,
            engine=one.layout.engine,
            dtype="bfloat16",
            remat="none",
            precision=None if one.recipe == BFLOAT16 else recipe_of(one.recipe),
        )
    )
    assert not plan.errors, plan.errors
    return plan


@cache
def batches(steps: int) -> list[Batch]:
    """The rows of the first steps, the same for every run."""
    rows = Rows(corpus=read_corpus("stdlib", ByteTokenizer()), length=LENGTH)
    of_steps = Batches(rows=rows, batch=ROWS, seed=SEED)
    return [of_steps.read(step).arrays for step in range(steps)]


def losses_of(one: Curve, ranks: Ranks, steps: int = STEPS) -> Losses:
    """The loss of each of the first steps of the schedule."""
    plan = plan_of(one)
    if one.layout.engine == "jax":
        run = run_plan(plan, compile_plan(plan, 1, OPTIONS), batches(steps), SEED)
    else:
        run = trained_on(ranks.first(one.layout.devices), plan, batches(steps), SEED, options=OPTIONS).run
    return [round(float(loss), 5) for loss in run.losses]


def kept() -> dict[str, Losses]:
    """The losses in the file, by the names of the curves."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def keep(losses: Mapping[str, Losses]) -> None:
    lines = [
        f" {json.dumps(str(one))}: {json.dumps(losses[str(one)], separators=(',', ':'))}"
        for one in CURVES
        if str(one) in losses
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def beside(one: Curve, losses: Mapping[str, Losses]) -> float:
    """How far the final loss is from bfloat16's, relative."""
    high = losses[str(Curve(model=one.model, layout=one.layout, recipe=BFLOAT16))][-1]
    return losses[str(one)][-1] / high - 1


def main() -> int:
    from tests.sameness.curves_page import write_page

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true", help="only curves that are not in the file")
    parser.add_argument("--page", action="store_true", help="train nothing")
    given = parser.parse_args()
    losses = kept()
    ranks = Ranks(8, in_group, LIMIT_S)
    try:
        for one in CURVES:
            if given.page or given.only not in str(one) or (given.missing and str(one) in losses):
                continue
            began = time.monotonic()
            losses[str(one)] = losses_of(one, ranks)
            keep(losses)
            print(
                f"{one}: {losses[str(one)][0]} to {losses[str(one)][-1]} in {time.monotonic() - began:.0f} s",
                flush=True,
            )
    finally:
        ranks.end()
    if any(str(one) not in losses for one in CURVES):
        return 0
    write_page(losses)
    wrong = [one for one in CURVES if abs(beside(one, losses)) > ALLOWED]
    for one in wrong:
        print(f"{one}: {beside(one, losses):+.2%} from bfloat16", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
