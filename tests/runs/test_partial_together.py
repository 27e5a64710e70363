"""Weights of which one is cast and one is new, read by several processes together: as each reads them alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardwright.checkpoint import TensorInfo, open_checkpoint
from shardwright.checkpoint.exchange import units
from shardwright.checkpoint.exchange.passing import read_together
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from shardwright.init import box_values
from shardwright.models import build
from shardwright.runs.partial import FittedWeights
from tests.checkpoint.states import State, same_bits, save
from tests.checkpoint.test_passing import by_all

COUNT = 3


def test_cast_and_new_weights_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 64)
    new = build("llama3-test", {"num_layers": "1", "embed": "16", "vocab": "12"}).weight("embedding.tokens")
    array = np.linspace(-3, 3, 96, dtype=np.float32).reshape(8, 12)
    halves = [Box((0, 0), (8, 6)), Box((0, 6), (8, 12))]
    found = open_checkpoint(save(tmp_path, State(arrays={"w": array}, boxes={"w": halves})))
    tensors = {
        "w": replace(found.tensor("w"), dtype="bfloat16"),
        new.name: TensorInfo(name=new.name, shape=new.shape, dtype="float32"),
    }
    weights = FittedWeights(found=found, point=found.point, tensors=tensors, new={new.name: new}, seed=5)
    needed = {
        "w": array.astype(ml_dtypes.bfloat16),
        new.name: box_values(new, 5, Box.whole(new.shape)),
    }
    for name, elements in needed.items():
        whole = Box.whole(elements.shape)
        rows = Box(whole.start, (elements.shape[0] // 2, *whole.stop[1:]))
        boxes = {0: whole, 1: whole, 2: rows}
        wants = wants_of(boxes.items())
        together = by_all(
            COUNT,
            lambda carrier, name=name, boxes=boxes, wants=wants: read_together(
                weights, name, [boxes[carrier.index]], wants, carrier
            ),
        )
        for process, answer in enumerate(together):
            assert not isinstance(answer, Exception), answer
            assert same_bits(answer[0], elements[boxes[process].slices]), (name, process)
