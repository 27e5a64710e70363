"""A few of the bits that ``python -m tests.checkpoint.flipping`` flips."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint import flipping
from tests.checkpoint.flipping import flipped, saved_by_several


def test_flipped_bits_and_truncated_files_are_found(tmp_path: Path) -> None:
    counts = flipped(tmp_path, random.Random(0), flips=30, truncations=6)
    assert counts.total() == 36
    assert {kind for _, kind, _ in counts} == {"boxes.index", "boxes.safetensors", "manifest.json", "part.index"}
    assert {when for _, _, when in counts} >= {"opening", "reading"}


def test_a_bit_that_nothing_finds_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by_several(tmp_path, flipping.EARLIER)
    newest = saved_by_several(tmp_path, flipping.NEWEST)
    path = newest / "boxes-00001-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert flipping.found_when(tmp_path, path) == "reading"
    monkeypatch.setattr(flipping, "verify", lambda _: {"checkpoints": [{"ok": True}, {"ok": True, "step": 5}]})
    with pytest.raises(AssertionError):
        flipping.found_when(tmp_path, path)
