"""The order of layouts: published pairs of one model on the same chips."""

from __future__ import annotations

import re

import pytest

from benchmarks.published.__main__ import Row, row_of
from benchmarks.published.later.__main__ import HERE, PAGE, WIDER
from benchmarks.published.later.pairs import FAR, HEADER, Pair, alike, layout, pairs, section
from benchmarks.published.steps import Published, published, steps_of

EVERY = {step.name: step for step in (*published(), *steps_of(HERE), *steps_of(WIDER))}
MADE_ANEW = (
    "kempner-8b-h200-2-fsdp2",
    "kempner-8b-h200-2-tp2",
    "kempner-8b-h200-4-fsdp4",
    "kempner-8b-h200-4-fsdp2-tp2",
    "kempner-8b-h200-4-tp4",
    "simumax-llama3-70b-l12-tp4-pp1-dp2-mbc8",
    "simumax-llama3-70b-l12-tp8-pp1-dp1-mbc8",
)
"""Without stages, whose plans take longer."""


def on_page() -> dict[tuple[str, str], tuple[float, float]]:
    """What is published and planned of each pair, as the page has it."""
    table = PAGE.read_text(encoding="utf-8").split(HEADER)[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {(one[0], one[1]): (float(one[2]), float(one[3])) for one in cells}


def test_the_page_has_every_pair() -> None:
    steps = list(EVERY.values())
    expected = {
        frozenset((first.name, second.name))
        for number, first in enumerate(steps)
        for second in steps[number + 1 :]
        if alike(first) == alike(second) and layout(first) != layout(second)
    }
    assert {frozenset(names) for names in on_page()} == expected
    assert len(expected) >= 37


def test_the_faster_of_two_layouts_is_said_to_be_faster_in_nine_of_ten() -> None:
    """The aim is nine of ten; all were right when this was written, and three were off by more than 15%: tensor parallelism on H200."""
    found = on_page()
    # The page rounds: one pair is planned at 1.00.
    right = sum(planned >= 1 for _, planned in found.values())
    far = [names for names, (published, planned) in found.items() if abs(planned / published - 1) > FAR]
    assert all(published >= 1 for published, _ in found.values())
    assert right >= 0.9 * len(found)
    assert len(far) <= 4, far
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"said to be faster: {right} of {len(found)}\n", text)


def test_pairs_made_anew_are_those_of_the_page() -> None:
    """`python -m benchmarks.published.later` writes them anew."""
    made = list(pairs(row_of(EVERY[name]) for name in MADE_ANEW))
    assert len(made) == 5
    for pair in made:
        published, planned = on_page()[pair.slower.step.name, pair.faster.step.name]
        assert (pair.published, pair.planned) == pytest.approx((published, planned), abs=0.02)
        assert pair.is_right


def test_a_pair_in_the_wrong_order_is_shown_as_wrong() -> None:
    first, second = (Row(EVERY[name], 1.0, 1.0, 0.9, 1.1, 1.0, None) for name in MADE_ANEW[:2])
    assert "| 1.10 | 0.90 | -18%: wrong |" in section([Pair(first, second, 1.1, 0.9)])


def test_another_precision_release_or_length_is_no_pair() -> None:
    def changed(step: Published, old: str, new: str) -> Published:
        assert old in step.plan
        return Published(
            **{**{name: getattr(step, name) for name in Published.__slots__}, "plan": step.plan.replace(old, new)}
        )

    step = EVERY["kempner-8b-h200-4-fsdp4"]
    for old, new in (
        ("--length 4096", "--length 8192"),
        ("h200-4-compiled", "h200-compiled"),
        ("--remat full", "--remat full --precision fp8-current"),
        ("h200:4", "h200:8"),
        ("--engine torch", "--engine jax"),
    ):
        assert alike(changed(step, old, new)) != alike(step)
    assert alike(changed(step, "--batch 32", "--batch 8")) == alike(step)
