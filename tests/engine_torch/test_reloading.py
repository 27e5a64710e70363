"""A dim that ``tensor`` does not divide, saved and loaded on ranks by PyTorch's own checkpoint: what SW104 says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.boxes.reloading import reloading
from tests.engine_torch.dcp import reloaded
from tests.engine_torch.ranks import Ranks

SIZES = [
    # Named after PyTorch's #168134, #161368: a save that is refused, one that loads with old rows, and one that is right.
    (13, 2, 6, "not saved"),
    (7, 2, 6, "old rows"),
    (9, 2, 8, "old rows"),
    (17, 2, 8, "old rows"),
    (10, 2, 8, "right"),
    (9, 4, 8, "right"),
    (50257, 2, 8, "not saved"),
    (50257, 4, 8, "right"),
]


@pytest.mark.parametrize(("size", "tensor", "num", "expected"), SIZES)
def test_the_finding_says_what_the_checkpoint_does(
    size: int, tensor: int, num: int, expected: str, eight: Ranks, tmp_path: Path
) -> None:
    found = reloading(size, (tensor,), num // tensor)
    answers = eight.first(num).run(reloaded, size, tensor, tmp_path / "saved")
    first, _, alone = answers[0].partition(", alone: ")
    ranks = [first, *answers[1:]]
    assert found.ranks == num
    assert found.is_saved == ("not saved" not in ranks)
    if found.is_saved:
        assert ranks.count("old rows") == found.stale
        assert ranks.count("right") == num - found.stale
        assert (alone == "fails") == (found.short > 0)
        assert alone in ("fails", "right") or found.moved
    assert expected in ranks
