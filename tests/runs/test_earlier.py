"""Which lines of ``metrics.jsonl`` are kept, with any damage to one of them."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runs.metrics.earlier import Earlier, earlier_lines


def line(step: int | None) -> bytes:
    return json.dumps({"step": step, "loss": 7 + (step or 0) / 1000, "tokens": 8}).encode() + b"\n"


def found(steps: list[int | None], first_step: int) -> Earlier:
    return earlier_lines(b"".join(map(line, steps)), first_step)


@pytest.mark.parametrize(
    ("steps", "first_step", "damaged"),
    [
        ([1, 2, 1, 4, 5], 5, [3]),
        ([1, 2, 4, 4, 5], 5, [3]),
        ([1, 2, 3, 3, 5], 5, [4]),
        ([1, 2, 5, 4, 3], 5, [3, 5]),
        ([2, 2], 2, [1]),
        ([1, 1], 2, [2]),
        ([9, 2, 3], 3, [1]),
        ([1, 2, 3, 9, 5], 5, [4]),
        ([1, 2, 3, 9, 5, 6], 4, [4]),
        # Of a later step, where the line of the last step that stays belongs.
        ([1, 2, 3, 4, 9], 5, [5]),
        ([1, 2, None, 9], 4, [3, 4]),
        ([1, 2, 3, 4, 9], 4, []),
        # A line of a step that is done again reads as one that stays.
        ([1, 2, 3, 4, 5, 1], 4, [6]),
        # Lines that were found damaged once are gone from the file.
        ([1, 4, 5, 9, 10], 10, []),
        ([1, 4, 4, 5, 9, 10], 10, [2]),
    ],
)
def test_a_line_is_damaged_whose_step_is_not_between_those_around_it(
    steps: list[int | None], first_step: int, damaged: list[int]
) -> None:
    sorted_lines = found(steps, first_step)
    assert sorted_lines.damaged == [(place, line(steps[place - 1])) for place in damaged]
    good = [step for place, step in enumerate(steps, 1) if place not in damaged]
    assert sorted_lines.kept == [line(step) for step in good if step is not None and step <= first_step]
    assert sorted_lines.later == [line(step) for step in good if step is not None and step > first_step]
    assert sorted_lines.incomplete == b""


@given(data=st.data())
def test_one_digit_costs_one_line(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 120))
    first_step = data.draw(st.integers(1, count))
    lines = [line(step) for step in range(1, count + 1)]
    place = data.draw(st.integers(1, count))
    whole = lines[place - 1]
    digit = data.draw(st.sampled_from([at for at, char in enumerate(whole) if chr(char).isdigit()]))
    other = data.draw(st.sampled_from([char for char in b"0123456789" if char != whole[digit]]))
    flipped = whole[:digit] + bytes([other]) + whole[digit + 1 :]
    sorted_lines = earlier_lines(b"".join([*lines[: place - 1], flipped, *lines[place:]]), first_step)
    others = [each for step, each in enumerate(lines, 1) if step != place]
    assert [each for each in (*sorted_lines.kept, *sorted_lines.later) if each != flipped] == others
    in_step = digit < whole.index(b",")
    stays = [] if in_step else [flipped]
    if place <= first_step:
        assert sorted_lines.kept == [*lines[: place - 1], *stays, *lines[place:first_step]]
        assert sorted_lines.damaged == [(place, flipped)] * in_step
    elif not in_step:
        assert sorted_lines.later == [*lines[first_step : place - 1], flipped, *lines[place:]]
        assert sorted_lines.damaged == []


@given(steps=st.lists(st.none() | st.integers(1, 9), max_size=7))
def test_as_few_lines_as_can_be_are_damaged(steps: list[int | None]) -> None:
    """Against all choices there are."""
    there = [step for step in steps if step is not None]
    most = max(
        length
        for length in range(len(there) + 1)
        for some in combinations(there, length)
        if all(before < after for before, after in pairwise(some))
    )
    kept = [json.loads(each)["step"] for each in found(steps, 9).kept]
    assert len(kept) == most
    assert kept == sorted(set(kept))
