"""Ranks whose checkpoints are in S3: each writes and reads its own boxes there."""

from __future__ import annotations

import pytest

from shardwright.checkpoint import verify
from tests.engine_torch.own_saved import load_small, save_small, save_small_in_background
from tests.engine_torch.ranks import Ranks
from tests.matrix import some
from tests.storage.s3 import Server, keys, run_using

SAVES = (save_small, save_small_in_background)


@pytest.mark.parametrize("save", some(SAVES, [0]))
def test_two_ranks_save_and_load(four: Ranks, s3: Server, save: object, request: pytest.FixtureRequest) -> None:
    folder = f"ranks/{request.node.name}"
    url, two = f"s3://bucket/{folder}", four.first(2)
    two.run(run_using, s3.environment, save, "fsdp", (2,), url)
    names = [name.rpartition("/")[2] for name in keys(f"{folder}/")]
    assert sorted(names) == [
        "boxes-00000-00000.safetensors",
        "boxes-00001-00000.safetensors",
        "boxes.index",
        "manifest.json",
        "part-00000.index",
        "part-00001.index",
    ]
    assert verify(url)["ok"]
    for kind in ("fsdp", "replicated"):
        assert two.run(run_using, s3.environment, load_small, kind, (2,), url) == [[], []]
