"""Random option sets with recipes of low precision: the collectives of each plan against those of its program.

    python -m tests.cli.compared [--first 0] [--count 100] [--engine torch]

The option sets are those of ``drawn.py``, with a recipe for most of them and more layers for some. PyTorch's step is
dry-run, and JAX's compiled for simulated devices.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.cli.running.compile_torch import compile_by_dry_run
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.agreement.matching import AgreementRow
from shardwright.compiled.reading.read import read
from shardwright.core.findings.errors import ShardwrightError
from shardwright.core.plan.plan import Plan
from shardwright.cost import read_machine
from tests.cli.drawn import Drawn, drawn, plan_of

SMALL = """
recipe: small-blocks
operands:
  output: {input: &row {dtype: float8_e4m3fn, block: 1 x 8, scale: power of two up}, weight: &square {dtype: float8_e4m3fn, block: 8 x 8, scale: exact}}
  input_gradient: {output_gradient: *row, weight: *square}
  weight_gradient: {input: {dtype: float8_e4m3fn, block: per tensor, scale: exact}, output_gradient: {dtype: float8_e5m2, block: per tensor, scale: exact}}
"""
RECIPES = (
    "fp8-current",
    "fp8-current",
    "fp8-row",
    "fp8-row",
    "fp8-block",
    "mxfp8",
    "fp8-delayed",
    "nvfp4",
    "small",
    None,
)
LAYERS = ("num_layers=1", "num_layers=1", "num_layers=2")


def with_recipe(one: Drawn, seed: int, folder: Path) -> Drawn:
    """The option set with a recipe, or none, and with one layer or several of each kind; of one dtype."""
    dice = random.Random(f"recipe {seed}")
    recipe = dice.choice(RECIPES)
    if recipe == "small":
        (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
        recipe = str(folder / "small.yaml")
    ((settings,),) = one.options.set
    settings = settings.replace("num_layers=1", dice.choice(LAYERS)).replace(
        "num_layers=2", dice.choice(("num_layers=2", "num_layers=3"))
    )
    return replace(one, options=replace(one.options, precision=recipe, set=((settings,),)))


def compared(plan: Plan) -> list[AgreementRow]:
    """The rows of the comparison that do not match."""
    if plan.request.engine == "torch":
        agreement = compile_by_dry_run(plan).agreement
    else:
        from shardwright.engine_jax.compile.compiling import build, lower_step

        target = f"cpu:{plan.mesh.num_devices}"
        machine = read_machine(target)
        built = build(lower_step(plan, machine), machine)
        agreement = agree(plan, read(built.text, plan.mesh, target=target, stats=built.stats, compile_seconds=0.0))
    return [row for row in agreement.rows if row.state == "unmatched"]


def in_words(row: AgreementRow) -> str:
    return (
        f"    {row.component} {row.kind} {','.join(row.axes)}: plan {row.predicted_bytes} in {row.predicted_count}, program "
        f"{row.compiled_bytes} in {row.compiled_count}"
    )


def main() -> int:
    # The simulated devices of the tests, and their environment.
    import tests.conftest  # noqa: F401

    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--engine", choices=("jax", "torch"))
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        for seed in range(given.first, given.first + given.count):
            one = with_recipe(drawn(seed), seed, Path(folder))
            if given.engine not in (None, one.options.engine):
                continue
            try:
                plan = plan_of(one, Path(folder))
            except ShardwrightError as error:
                ends[type(error).__name__] += 1
                continue
            if plan.errors:
                ends.update({finding.code for finding in plan.errors})
                continue
            try:
                rows = compared(plan)
            except Exception as error:  # Any error is reported, and the next set is tried.
                ends["not built"] += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                print(
                    f"seed {seed}: {type(error).__name__}: {str(error)[:300]} at {place.filename}:{place.lineno}\n{one}",
                    flush=True,
                )
                continue
            ends["not the plan" if rows else f"as planned by {plan.request.engine}"] += 1
            if rows:
                print(f"seed {seed}: {one}", *map(in_words, rows), sep="\n", flush=True)
    print(dict(ends))
    return 1 if ends["not built"] or ends["not the plan"] else 0


if __name__ == "__main__":
    sys.exit(main())
