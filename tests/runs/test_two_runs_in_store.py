"""Two runs that save in one folder that is neither's own, where no lock keeps them apart: the second to save there ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import CheckpointError, describe
from shardwright.storage.url import parsed_place
from tests.runs.counting import ROWS, Counting, counting, go, options
from tests.storage.faulty import FaultyFileSystem, keys


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    FaultyFileSystem.store.clear()
    yield
    FaultyFileSystem.store.clear()


def everything(where: str) -> list[str]:
    """What is in the store, or in the shared folder."""
    return keys() or sorted(str(path) for path in Path(where).rglob("*"))


@pytest.mark.parametrize("where", ["faulty://store/run", "shared"])
def test_a_run_ends_where_another_one_has_saved(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = replace(options(tmp_path), checkpoints=parsed_place(where), checkpoint_every=2)
    second = replace(first, out=tmp_path / "second", resume=True, checkpoint_every=3)

    class Overtaken(Counting):
        def step(self, batch: Any, before_update: Any) -> Any:
            if self._step == 2:
                assert go(counting(), second, stop_after=3).step == 3
                self.before = everything(where)
            return super().step(batch, before_update)

    engine = Overtaken(range(ROWS), {"counting": "1"})
    with pytest.raises(CheckpointError) as raised:
        go(engine, first, keep=1)
    assert str(raised.value) == (
        f"{where}/checkpoints/step-00000003: another run has saved this step while this one was running. This one ends, and "
        "deletes nothing: two runs would delete and continue each other's checkpoints. Give each a folder of its own with "
        "--checkpoints."
    )
    assert everything(where) == engine.before
    assert [one["step"] for one in describe(second.saved_under)["checkpoints"]] == [3, 2]
    # The other one goes on.
    assert go(counting(), second).step == 6
