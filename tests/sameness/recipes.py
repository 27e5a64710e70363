"""What layouts move under each recipe of low precision, and how much losses differ then: ``python -m tests.sameness.recipes``
measures it again and writes docs/sameness-fp8.md; fails where a layout moves what is free, or is beyond a bound.

    python -m tests.sameness.recipes [--only TEXT] [--engine jax] [--missing] [--steps 20]

A line stays in the page until it is measured again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.core.plan.plan import Plan
from tests.conftest import ROOT
from tests.engine_jax.steps import OPTIONS, STEPS, Run, compile_plan, run_plan
from tests.engine_torch.meeting import in_group
from tests.engine_torch.quantizing import quantized_by
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.sameness.bounds import OF_LOSS
from tests.sameness.codes import Place, Recorded, marked, moved, valid_rows
from tests.sameness.recipe_bounds import ORDERS, SEED, Share, batches, bounded, share
from tests.sameness.recipe_cases import LENGTH, ROWS, VOCAB, RecipeCase, every_case, plan_of

PAGE = ROOT / "docs" / "sameness-fp8.md"
RECORDED_STEPS = 2
NAMES = {"torch": "PyTorch", "jax": "JAX"}
OF = {"output": "", "input_gradient": " for dX", "weight_gradient": " for dW"}

INTRODUCTION = """\
# What a layout moves under a recipe

Every recipe that both engines run ([fp8.md](fp8.md)) under six layouts, compared with one device of PyTorch, in float32. In
`mixtral-test` every token is assigned to all experts. `renamed` is `fsdp-tp` on axes of other names, with replicas.

**Codes.** In two steps of models of one layer, what all devices quantize is put together to entire operands, of all three products
of each weight. `moved` is the largest share of their elements whose code or scale is not the one that a single device makes of the
same elements; 0 means equal bytes, so one scale on every device that shares it. `free` is what the plan says; what is not free
has the finding [SW404](findings/SW404.md), and then `moved` says of which operand.

**Losses.** {steps} steps of the same models. Elements are results of other products, which another layout or engine sums in another order;
now and then a last bit decides between two codes, up to a quarter apart. Law 3 allows what another order of summation does on one
device: the loss of a step may differ by {of_loss:g} times the root mean square over {orders} orders of all sums and of each expert's tokens, of the largest
step so far. A gradient in step 1 may differ by twice the recipe's own error, which is how far the recipe moves it on one device. Both are shares of these bounds.
{notes}
`python -m tests.sameness.recipes` measures again and writes this page, as part of `make test-all`.

| recipe | model | layout | free | engine | moved | loss | share of its bound | share of a gradient's | of |
|---|---|---|---|---|---|---:|---:|---:|---|
"""


class Measured(NamedTuple):
    """A line of the page. ``wrong``: what must not be, in words."""

    line: str
    wrong: str


def recorded(engine: str, plan: Plan, ranks: Ranks, steps: int = RECORDED_STEPS) -> list[Recorded]:
    """What each device quantizes, step by step."""
    rows = [valid_rows(ROWS, LENGTH, VOCAB, step) for step in range(steps)]
    if engine == "jax":
        from tests.engine_jax.quantizing import quantized_by_devices

        return quantized_by_devices(marked(plan), SEED, rows)
    found = ranks.first(plan.mesh.num_devices).run(quantized_by, marked(plan), SEED, OPTIONS, rows)
    return [[of_rank[step] for of_rank in found] for step in range(steps)]


def most_moved(engine: str, one: RecipeCase, ranks: Ranks) -> dict[Place, float]:
    """The largest share of each operand that is moved, in all steps."""
    plan = plan_of(one, "jax" if engine == "jax" else "torch")
    found: dict[Place, float] = {}
    for step in recorded(engine, plan, ranks):
        for place, by in moved(plan, step).items():
            found[place] = max(by, found.get(place, 0.0))
    return found


def free_of(plan: Plan) -> dict[Place, bool]:
    return {
        Place(weight.name, one.product, one.operand): one.freedom.free
        for weight in plan.quantized
        for one in weight.operands
    }


def run_of(engine: str, one: RecipeCase, ranks: Ranks, steps: int) -> Run:
    if engine == "jax":
        plan = plan_of(one, "jax")
        return run_plan(plan, compile_plan(plan), batches(steps), SEED)
    plan = plan_of(one, "torch")
    return trained_on(ranks.first(one.devices), plan, batches(steps), SEED).run


def measured(engine: str, one: RecipeCase, ranks: Ranks, steps: int) -> Measured:
    plan = plan_of(one, "jax" if engine == "jax" else "torch")
    free, by = free_of(plan), most_moved(engine, one, ranks)
    where = max(by, key=by.__getitem__)
    found = share(run_of(engine, one, ranks, steps), *bounded(one.alone, steps))
    return Measured(_line(engine, one, all(free.values()), where, by[where], found), _wrong(plan, free, by, found))


def _wrong(plan: Plan, free: dict[Place, bool], by: dict[Place, float], found: Share) -> str:
    if places := [place for place in by if free[place] and by[place]]:
        return f"what is free was moved: {places[:3]}"
    if ("SW404" in {finding.code for finding in plan.findings}) == all(free.values()):
        return "SW404 does not say what is free"
    return "" if max(found.of_loss, found.of_gradient) <= 1 else f"beyond a bound: {found}"


def _line(engine: str, one: RecipeCase, free: bool, where: Place, most: float, found: Share) -> str:
    recipe, model, layout, name = key(one, engine)
    weight = where.weight.removeprefix("layers.")
    what = "0" if not most else f"{most:.0%}: {where.operand.replace('_', ' ')} of {weight}{OF[where.product]}"
    return (
        f"| {recipe} | {model} | {layout} | {'yes' if free else 'no'} | {name} | {what} | {found.loss:.1e} | {found.of_loss:.2f} | "
        f"{found.of_gradient:.2f} | {found.weight.removeprefix('layers.')} |\n"
    )


def every_line(engines: Sequence[str], steps: int, wanted: Callable[[RecipeCase, str], bool]) -> Iterator[Measured]:
    ranks = Ranks(8, in_group)
    try:
        for one in every_case():
            for engine in engines:
                if wanted(one, engine):
                    yield measured(engine, one, ranks, steps)
    finally:
        ranks.end()


def key_of(line: str) -> tuple[str, ...]:
    """Recipe, model, layout and engine of a line."""
    recipe, model, layout, _, engine, *_ = (cell.strip() for cell in line.strip("|\n").split("|"))
    return recipe, model, layout, engine


def key(one: RecipeCase, engine: str) -> tuple[str, ...]:
    sizes = ",".join(f"{axis}={size}" for axis, size in one.sizes)
    return f"`{one.recipe}`", one.model, f"{one.layout}, {sizes}", NAMES[engine]


def kept() -> dict[tuple[str, ...], str]:
    """The lines of the page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {key_of(line): line for line in text.splitlines(keepends=True) if line.startswith("| `")}


def keep(lines: Mapping[tuple[str, ...], str], steps: int) -> None:
    order = [key(one, engine) for one in every_case() for engine in NAMES]
    notes = ""
    if missing := [each for each in order if each not in lines]:
        notes = f"\nNot measured yet: {'; '.join(_together(missing, order))}.\n"
    text = INTRODUCTION.format(steps=steps, of_loss=OF_LOSS, orders=ORDERS, notes=notes)
    PAGE.write_text(text + "".join(lines[each] for each in order if each in lines), encoding="utf-8")


def _together(missing: Sequence[tuple[str, ...]], order: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines in words; all of a recipe together."""
    for recipe in dict.fromkeys(each[0] for each in missing):
        own = [each for each in missing if each[0] == recipe]
        if len(own) == sum(each[0] == recipe for each in order):
            yield f"all of {recipe}"
        else:
            yield from (", ".join(each) for each in own)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="")
    parser.add_argument("--engine", choices=tuple(NAMES), action="append")
    parser.add_argument("--missing", action="store_true", help="only lines that the page lacks")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = kept()

    def wanted(one: RecipeCase, engine: str) -> bool:
        return given.only in str(one) and not (given.missing and key(one, engine) in before)

    wrong, found = False, dict[tuple[str, ...], str]()
    for line in every_line(given.engine or tuple(NAMES), given.steps, wanted):
        print(line.line, end="", flush=True)
        if line.wrong:
            wrong = True
            print(f"    {line.wrong}", file=sys.stderr, flush=True)
        found[key_of(line.line)] = line.line
        if given.steps == STEPS:
            keep({**kept(), **found}, given.steps)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
