"""docs/curves-fp8.md and its plot, from the losses of ``curves.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.conftest import ROOT
from tests.sameness.curves import (
    ALLOWED,
    BFLOAT16,
    CURVES,
    LAYOUTS,
    LENGTH,
    OPTIONS,
    RECIPES,
    ROWS,
    SIZES,
    STEPS,
    Curve,
    Layout,
    Losses,
    beside,
)

PAGE, PLOT = ROOT / "docs" / "curves-fp8.md", ROOT / "docs" / "curves-fp8.svg"

COLOURS = dict(zip(RECIPES, ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), strict=True))
"""Those of Okabe and Ito, which people who see red and green alike tell apart."""

INTRODUCTION = f"""\
# Losses under each recipe

{STEPS} steps of each recipe ([fp8.md](fp8.md)) beside the same run without one: all else is computed in bfloat16, and weights rest in
float32. Two layouts on the two engines: {" and ".join("{title}" for _ in LAYOUTS)}.
The models are of the test sizes with two layers; a step has {ROWS} rows of {LENGTH} bytes of the source of Python's standard library, the
same rows in every run. No recipe keeps a layer high.

![Losses by step, and their distance from bfloat16's](curves-fp8.svg)

Above: losses. Below: how far each is from bfloat16's in the same step; the grey band is {ALLOWED:.0%}.

The loss of step {STEPS}, and its distance from bfloat16's; *last ten*: that of the mean of the last ten steps.

| recipe |{{heads}}
|---|{{rules}}
{{lines}}
The largest distance of a final loss is {{most:.2%}}; more than {ALLOWED:.0%} is an error.

How far a recipe stays behind depends on how fast the model learns. With `--lr 1e-3 --batch 16`, `llama3-test` under HSDP x TP ends at
2.51 in bfloat16, `fp8-current` 0.2% above it, and `nvfp4` about 2%, or 1.7% with `high_layers: 1` (23 November 2026): FP4 in every
layer of so small a model is more than 1% behind there.

`python -m tests.sameness.curves` trains all of them again, as part of `make test-all`, and writes this page. Any of them is also
a command, whose `metrics.jsonl` has the losses:

```text
{{command}}
```
"""


def write_page(losses: Mapping[str, Losses]) -> None:
    PAGE.write_text(page(losses), encoding="utf-8")
    PLOT.write_text(plot(losses), encoding="utf-8")


def page(losses: Mapping[str, Losses]) -> str:
    groups = [(model, layout) for model in SIZES for layout in LAYOUTS]
    lines = [
        f"| {_word(recipe)} | " + " | ".join(_cell(_curve(model, layout, recipe), losses) for model, layout in groups)
        for recipe in RECIPES
    ]
    text = INTRODUCTION.replace("{title} and {title}", " and ".join(map(_in_words, LAYOUTS)))
    return text.format(
        heads="".join(f" {model}, {layout.title} |" for model, layout in groups),
        rules="---|" * len(groups),
        lines="".join(f"{line} |\n" for line in lines),
        most=max(abs(beside(one, losses)) for one in CURVES),
        command=_command(CURVES[-1]),
    )


def _in_words(layout: Layout) -> str:
    mesh = ", ".join(f"{axis} {size}" for axis, size in layout.mesh.items() if size > 1)
    return f"{layout.title} ({mesh}) on {'JAX' if layout.engine == 'jax' else 'PyTorch'}"


def _word(recipe: str) -> str:
    return recipe if recipe == BFLOAT16 else f"`{recipe}`"


def _curve(model: str, layout: Layout, recipe: str) -> Curve:
    return Curve(model=model, layout=layout, recipe=recipe)


def _cell(one: Curve, losses: Mapping[str, Losses]) -> str:
    of_run = losses[str(one)]
    if one.recipe == BFLOAT16:
        return f"{of_run[-1]:.4f}"
    high = losses[str(_curve(one.model, one.layout, BFLOAT16))]
    last_ten = sum(of_run[-10:]) / sum(high[-10:]) - 1
    return f"{of_run[-1]:.4f}, {beside(one, losses):+.2%}; last ten {last_ten:+.2%}"


def _command(one: Curve) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in one.layout.mesh.items())
    settings = ",".join(f"{name}={value}" for name, value in SIZES[one.model].items())
    return (
        f"shardwright train {one.model} --layout fsdp-tp --mesh {mesh} --engine {one.layout.engine} --devices {one.layout.devices} \\\n"
        f"  --set {settings} \\\n"
        f"  --precision {one.recipe} --dtype bfloat16 --remat none --batch {ROWS} --length {LENGTH} --steps {STEPS} --lr {OPTIONS.lr:g} --warmup {OPTIONS.warmup} --out run"
    )


WIDTH, LOSSES_HIGH, APART_HIGH, GAP, LEFT, TOP = 240, 150, 110, 34, 44, 46
APART = 0.015
"""The largest distance that is drawn; what is farther is at the edge."""


def plot(losses: Mapping[str, Losses]) -> str:
    """A column for each model and layout: losses above, their distances from bfloat16's below."""
    groups = [(model, layout) for model in SIZES for layout in LAYOUTS]
    width = LEFT + len(groups) * (WIDTH + GAP)
    height = TOP + LOSSES_HIGH + GAP + APART_HIGH + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        "<title>Losses under each recipe of low precision</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(),
    ]
    for number, (model, layout) in enumerate(groups):
        of_group = {recipe: losses[str(_curve(model, layout, recipe))] for recipe in RECIPES}
        parts += _column(LEFT + number * (WIDTH + GAP), f"{model}, {layout.title}", of_group)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for number, (recipe, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * number
        yield f'<path d="M{x} 12h18" stroke="{colour}" stroke-width="3"/><text x="{x + 23}" y="16">{recipe}</text>'


def _column(x: int, title: str, losses: Mapping[str, Losses]) -> Iterator[str]:
    low, high = int(min(map(min, losses.values()))), 6
    yield f'<text x="{x}" y="{TOP - 8}">{title}</text>'
    yield from _frame(x, TOP, LOSSES_HIGH, [(f"{loss}", (high - loss) / (high - low)) for loss in range(low, high + 1)])
    below = TOP + LOSSES_HIGH + GAP
    band = APART_HIGH * ALLOWED / APART
    yield f'<rect x="{x}" y="{below + (APART_HIGH - band) / 2:.1f}" width="{WIDTH}" height="{band:.1f}" fill="#ddd"/>'
    marks = [(f"{share:+.1%}" if share else "0", (1 - share / APART) / 2) for share in (APART, 0.0, -APART)]
    yield from _frame(x, below, APART_HIGH, marks)
    for step in (1, 50, STEPS):
        yield f'<text x="{x + _across(step - 1):.0f}" y="{below + APART_HIGH + 14}" text-anchor="middle">{step}</text>'
    for recipe, of_run in losses.items():
        yield _line(x, TOP, [(high - loss) / (high - low) * LOSSES_HIGH for loss in of_run], recipe)
        if recipe != BFLOAT16:
            apart = [loss / other - 1 for loss, other in zip(of_run, losses[BFLOAT16], strict=True)]
            inside = [max(-APART, min(APART, share)) for share in apart]
            yield _line(x, below, [(1 - share / APART) / 2 * APART_HIGH for share in inside], recipe)


def _frame(x: int, y: int, height: int, marks: Sequence[tuple[str, float]]) -> Iterator[str]:
    for text, share in marks:
        at = y + share * height
        yield f'<path d="M{x} {at:.1f}h{WIDTH}" stroke="#999" stroke-width=".5"/>'
        yield f'<text x="{x - 4}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'


def _across(number: int) -> float:
    return number / (STEPS - 1) * WIDTH


def _line(x: int, y: int, heights: Sequence[float], recipe: str) -> str:
    points = " ".join(f"{x + _across(number):.0f},{y + height:.1f}" for number, height in enumerate(heights))
    return f'<polyline points="{points}" fill="none" stroke="{COLOURS[recipe]}"/>'
