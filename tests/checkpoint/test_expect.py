"""A checkpoint that does not match the program is refused entirely, and the error names every mismatched tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import save, small_state

FITS = {"embed": ((4, 8), "float32"), "scale": ((6,), "bfloat16"), "count": ((), "int32")}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save(tmp_path, small_state()))


def test_what_fits(checkpoint: Checkpoint) -> None:
    checkpoint.expect(FITS)
    checkpoint.expect({name: (list(shape), dtype) for name, (shape, dtype) in FITS.items()})


def test_everything_that_does_not_fit_is_named(checkpoint: Checkpoint) -> None:
    wanted = {
        "embed": ((8, 4), "float32"),
        "scales": ((6,), "bfloat16"),
        "count": ((), "int64"),
        "head": ((2,), "float32"),
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.expect(wanted)
    assert str(caught.value) == (
        f"{checkpoint.directory}: the checkpoint does not fit this run, and nothing of it was loaded:\n"
        "  'embed': shape: found (4, 8), needed (8, 4)\n"
        "  'scales': missing; the checkpoint has 'scale'\n"
        "  'count': dtype: found int32, needed int64\n"
        "  'head': missing\n"
        "  'scale': extra, bfloat16 (6,), which this run does not have"
    )
    assert caught.value.code == "SW504"


def test_a_long_list_is_truncated(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.expect({**FITS, **{f"layer {number}": ((1,), "float32") for number in range(25)}})
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  ... and 5 more"


def test_an_unknown_name(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_box("embd")
    assert str(caught.value) == f"{checkpoint.directory}: no tensor is called 'embd'. Did you mean 'embed'?"


@pytest.mark.parametrize("box", [Box((0, 0), (5, 8)), Box((0,), (4,))])
def test_a_box_that_cannot_be_is_our_own_mistake(checkpoint: Checkpoint, box: Box) -> None:
    with pytest.raises(AssertionError):
        checkpoint.read_box("embed", box)
