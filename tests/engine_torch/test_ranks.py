"""Ranks answer in their order, are the same processes in all calls, and never block a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine_torch import faulty
from tests.engine_torch.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, faulty.alone)
    yield ranks
    ranks.end()


def test_answers_come_in_the_order_of_ranks_from_the_same_processes(two: Ranks) -> None:
    first, second = two.run(faulty.who, "a"), two.run(faulty.who, "b")
    assert [answer[:3] for answer in first] == [("a", "0", "2"), ("a", "1", "2")]
    assert [answer[3] for answer in first] == [answer[3] for answer in second]


def test_what_a_rank_raises_is_reported_with_its_number(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 raised\nTraceback.*ValueError: on purpose\n$"):
        two.run(faulty.raises, 1)
    assert len(two.run(faulty.who, "again")) == 2


def test_a_rank_that_ends_is_reported_with_its_number(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"^rank 0 of 2 ended with exit code 3$"):
        two.run(faulty.ends, 0)


def test_a_rank_that_does_not_answer_is_reported_with_its_number(two: Ranks) -> None:
    two.run(faulty.who, "here")
    with pytest.raises(RankError, match=r"^no answer in 1 s: rank 1 of 2$"):
        two.run(faulty.hangs, 1, limit_s=1.0)
