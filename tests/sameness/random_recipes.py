"""Random shapes, recipes and layouts: a step of both engines, compared with each other and with the plan.

    python -m tests.sameness.random_recipes [--seed 0] [--first 0] [--count 60]

Where the plan has no error, the first step of both engines has the same loss, and gradients no farther from each other than twice the
recipe's own error (``recipe_bounds.py``); and the collectives of both programs are those of the plan. A plan with errors must say so in
findings.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import yaml

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.cli.running.compile_torch import compile_by_dry_run
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.reading.read import read
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.cli.compared import in_words
from tests.engine_jax.made_rows import LENGTH, tokens_of
from tests.engine_jax.program import NoStats
from tests.engine_jax.steps import Run, compile_plan, gradient_differences, recipe_of, run_plan
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.sameness.other_order import Here
from tests.sameness.random_layouts import random_layout

ROWS, VOCAB, DEVICES = 8, 96, 4
OPTIONS = {
    "fp8-delayed": ("amax_history_len=4", "margin=1"),
    "fp8-current": ("use_power_2_scales=1", "gather_quantized=1"),
    "fp8-row": ("round_scales_to_power_of_2=0", "gather_quantized=1"),
    "fp8-block": ("use_f32_scales=1", "gather_quantized=1"),
    "mxfp8": ("enable_2d_quantization=1", "gather_quantized=1"),
    "nvfp4": ("disable_rht=1", "disable_stochastic_rounding=1"),
}
OF_LOSS = 2.0**-8
"""Between two engines in the first step: last bits decide between two codes now and then."""
OF_ERROR, LAST_BITS = 2.0, 1e-4
SEED = 0


class Drawn(NamedTuple):
    """The same request for both engines, and what it is in words."""

    request: Request
    recipe: Recipe
    text: str


def drawn(seed: int, number: int) -> Drawn:
    dice = random.Random(f"recipes {seed} {number}")
    name, dims = _model(dice)
    recipe = _recipe(dice)
    table = build(name, {**dims, "vocab": str(VOCAB)})
    text = yaml.safe_dump(random_layout(dice, table, DEVICES), sort_keys=False)
    request = Request(
        layout=read_layout(parse_yaml(text, "random.yaml")),
        table=table,
        batch=ROWS,
        length=LENGTH,
        remat=dice.choice(("none", "full", "dots")),
        microbatches=dice.choice((1, 1, 2)),
        precision=recipe,
    )
    more = f"{request.microbatches} microbatches, remat {request.remat}"
    options = {**(recipe.options or {}), "gather_quantized": recipe.gather_quantized, "high_layers": recipe.high_layers}
    return Drawn(request, recipe, f"{name} {dims}, {recipe.name} {options}, {more}\n{text}")


def _model(dice: random.Random) -> tuple[str, dict[str, str]]:
    """Widths that some blocks divide and others do not."""
    name = dice.choice(("llama3-test", "mixtral-test", "deepseek3-test"))
    width = {"embed": dice.choice((32, 48, 64, 96, 128, 256)), "mlp": dice.choice((24, 32, 96, 128, 160, 256))}
    heads = {"num_heads": dice.choice((4, 8)), "num_kv_heads": 4, "head_dim": dice.choice((8, 16, 20, 32))}
    if name == "llama3-test":
        found = {"num_layers": dice.choice((1, 2)), **width, **heads, "tied": dice.choice(("true", "false"))}
    elif name == "mixtral-test":
        found = {"num_layers": dice.choice((1, 2)), **width, **heads, "num_experts": 4, "top_k": 4}
    else:
        latent = {"q_lora": dice.choice((16, 32)), "kv_lora": dice.choice((16, 32)), "nope_dim": 16, "rope_dim": 8}
        experts = {"expert_mlp": dice.choice((16, 32, 128)), "num_experts": 4, "top_k": 4, "num_groups": 1}
        found = {"num_layers": 2, **width, "num_heads": 4, "value_dim": 16, **latent, **experts, "num_chosen_groups": 1}
    return name, {key: str(value) for key, value in found.items()}


def _recipe(dice: random.Random) -> Recipe:
    name = dice.choice(list(PRESETS))
    chosen = [option for option in OPTIONS[name] if dice.random() < 0.35]
    chosen += ["high_layers=1"] if dice.random() < 0.15 else []
    return recipe_of(" ".join((name, *chosen)))


class Alone(NamedTuple):
    """One device of PyTorch, and how far the recipe moves its loss and each gradient."""

    run: Run
    of_loss: float
    of_gradients: Mapping[str, float]


def _alone(request: Request, recipe: Recipe) -> Alone:
    layout = read_layout(parse_yaml("name: alone\nmesh: {a: 1}\nroles: {a: fsdp}\n", "alone.yaml"))
    one = replace(request, layout=layout, microbatches=1, remat="none", engine="torch")
    low, high = (
        trained_on(Here(), make_plan(replace(one, precision=each)), [tokens_of(0, ROWS, VOCAB)], SEED).run
        for each in (replace(recipe, gather_quantized=False), None)
    )
    return Alone(
        low, abs(low.losses[0] / high.losses[0] - 1), gradient_differences(low.gradients[0], high.gradients[0])
    )


def unmatched(plan: Plan, text: str | None) -> list[str]:
    """The collectives of a program, JAX's by its text, that are not the plan's."""
    if text is None:
        rows = compile_by_dry_run(plan).agreement.rows
    else:
        program = read(text, plan.mesh, target=f"cpu:{plan.mesh.num_devices}", stats=NoStats(), compile_seconds=0.0)
        rows = agree(plan, program).rows
    return [in_words(row) for row in rows if row.state == "unmatched"]


def wrong_of(one: Drawn, ranks: Ranks, ends: Counter[str]) -> list[str]:
    """What is wrong with a case, in words."""
    plans: dict[str, Plan] = {}
    for engine in ("jax", "torch"):
        try:
            plan = make_plan(replace(one.request, engine=engine))
        except FindingsError as error:
            ends[error.findings[0].code] += 1
            return []
        except InputError as error:
            ends[str(error)[:60]] += 1
            return []
        ends.update({f"{finding.code} {engine}" for finding in plan.errors})
        if not plan.errors:
            plans[engine] = plan
    found, runs, batch = list[str](), dict[str, Run](), [tokens_of(0, ROWS, VOCAB)]
    for engine, plan in plans.items():
        if engine == "jax":
            step = compile_plan(plan)
            found += [f"jax: {row}" for row in unmatched(plan, step.as_text())]
            runs[engine] = run_plan(plan, step, batch, SEED)
        else:
            found += [f"torch: {row}" for row in unmatched(plan, None)]
            runs[engine] = trained_on(ranks.first(plan.mesh.num_devices), plan, batch, SEED).run
        ends[f"a step of {engine}"] += 1
    if runs:
        alone = _alone(one.request, one.recipe)
        found += [f"{engine}: {text}" for engine, run in runs.items() for text in _apart(run, alone, engine)]
    return found


def _apart(run: Run, alone: Alone, engine: str) -> Iterator[str]:
    loss = abs(run.losses[0] / alone.run.losses[0] - 1)
    if not loss <= max(OF_LOSS, OF_ERROR * alone.of_loss):
        yield f"loss {run.losses[0]}, on one device {alone.run.losses[0]}"
    apart = gradient_differences(run.gradients[0], alone.run.gradients[0])
    shares = {name: by / max(OF_ERROR * alone.of_gradients[name], LAST_BITS) for name, by in apart.items()}
    most = max(shares, key=shares.__getitem__)
    print(f"    {engine}: loss {loss:.1e}, {most} {apart[most]:.1e}, {shares[most]:.2f} of its bound", flush=True)
    if not shares[most] <= 1:
        yield f"gradient of {most} {apart[most]:.1e}, the recipe's error {alone.of_gradients[most]:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    wrong, start, ranks = 0, time.monotonic(), Ranks(DEVICES, in_group)
    try:
        for number in range(given.first, given.first + given.count):
            one = drawn(given.seed, number)
            try:
                found = wrong_of(one, ranks, ends)
            except Exception as error:  # Any error is reported, and the next case is tried.
                place = traceback.extract_tb(error.__traceback__)[-1]
                found = [f"{type(error).__name__}: {str(error)[:600]} at {place.filename}:{place.lineno}"]
            finally:
                jax.clear_caches()
            print(f"{time.monotonic() - start:6.0f} s {number} {one.recipe.name}", flush=True)
            if found:
                wrong += 1
                print(f"number {number}: {one.text}", *found, sep="\n    ", flush=True)
    finally:
        ranks.end()
    print(dict(ends))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
