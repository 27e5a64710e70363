"""The first steps of runs in low precision, beside those of bfloat16; ``python -m tests.sameness.curves`` trains all of them to the end."""

from __future__ import annotations

import numpy as np

from tests.engine_torch.ranks import Ranks
from tests.sameness.curves import ALLOWED, BFLOAT16, CURVES, FILE, LAYOUTS, STEPS, Curve, beside, kept, losses_of
from tests.sameness.curves_page import PAGE, PLOT, page, plot
from tests.sameness.recipe_cases import LLAMA3

FEW_STEPS = 8


def test_the_first_losses_are_those_of_bfloat16(four: Ranks) -> None:
    high, low = (
        np.array(losses_of(Curve(model=LLAMA3, layout=LAYOUTS[0], recipe=recipe), four, FEW_STEPS))
        for recipe in (BFLOAT16, "fp8-block")
    )
    assert high[-1] < high[0] - 0.5
    assert (low != high).any()
    np.testing.assert_allclose(low, high, rtol=ALLOWED)


def test_every_recipe_ends_where_bfloat16_does() -> None:
    losses = kept()
    assert losses.keys() == {str(one) for one in CURVES}, f"python -m tests.sameness.curves --missing writes {FILE}"
    assert {len(of_run) for of_run in losses.values()} == {STEPS}
    assert {str(one): beside(one, losses) for one in CURVES if abs(beside(one, losses)) > ALLOWED} == {}


def test_the_page_and_the_plot_are_those_of_the_losses() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(kept())
    assert PLOT.read_text(encoding="utf-8") == plot(kept())
