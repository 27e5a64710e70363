"""What one layout saves, another one loads bit for bit, on both engines: a random part of the pairs of ``tests.pairs.whole``."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import RunPoint
from tests.engine_torch.ranks import Ranks
from tests.pairs import on_jax
from tests.pairs.cases import ENGINES, MODELS, Place, places, plan_of, uneven_weights, values_of
from tests.pairs.exchanging import STEP, exchange, load_at, save_at

SEED = 13
DRAWN = {
    "deepseek3-test": ((2, 1), (8, 1)),
    "llama3-test": ((8, 1), (9, 1)),
    "mixtral-test": ((1, 1), (2, 1)),
    "llama3-1b": ((3, 2), (3, 2)),
}
"""How many places of JAX and of PyTorch save, and how many others or the same load: a twentieth of all pairs. A load of the largest model
takes 0.1 s on JAX, and ten times that on the four ranks."""


def drawn(model: str) -> tuple[list[Place], list[Place]]:
    """The places that save and those that load."""
    draw, known = random.Random(f"{SEED}/{model}"), places(model)
    engines = [[place for place in known if place.engine == engine] for engine in ENGINES]
    saving, loading = (
        [place for of, number in zip(engines, numbers, strict=True) for place in draw.sample(of, number)]
        for numbers in DRAWN[model]
    )
    return saving, loading


@pytest.mark.parametrize("model", MODELS)
def test_what_a_layout_saves_every_other_one_loads(model: str, four: Ranks, tmp_path: Path) -> None:
    _, pairs = exchange(*drawn(model), tmp_path, four)
    assert {pair: wrong for pair, wrong in pairs.items() if wrong} == {}


def test_the_pairs_are_of_all_kinds() -> None:
    assert all(len(MODELS[model].layouts) >= 14 for model in ("deepseek3-test", "llama3-test"))
    for model in MODELS:
        saving, loading = drawn(model)
        for part in (saving, loading, places(model)):
            assert {place.engine for place in part} == set(ENGINES)
    assert sum(uneven_weights(plan_of(place)) > 0 for model in MODELS for place in drawn(model)[0]) >= 5
    num_drawn = sum(len(saving) * len(loading) for saving, loading in map(drawn, MODELS))
    assert num_drawn >= sum(len(places(model)) ** 2 for model in MODELS) / 20


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_bit_that_differs_is_found(engine: str, four: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in which one bit is another, with digests that agree."""
    right = places("mixtral-test")[0]
    name = "moments.second/layers.moe.down"

    def changed(asked: str, *arguments: object) -> np.ndarray:
        array = np.array(values_of(asked, *arguments))  # pyright: ignore[reportArgumentType]
        if asked == name:
            array.reshape(-1)[-1] = -array.reshape(-1)[-1]
        return array

    with monkeypatch.context() as patched:
        patched.setattr(on_jax, "values_of", changed)
        plan = plan_of(right)
        point = RunPoint(step=STEP, seed=0, data_position=0, model="m", layout_name="l", layout_text="", mesh={})
        on_jax.save(plan, point, tmp_path / "changed", asynchronous=False)
    save_at(right, tmp_path / "right", four, asynchronous=False)
    there = next(place for place in places("mixtral-test") if place.engine == engine and place.layout == "ep")
    found = load_at(there, [tmp_path / "right", tmp_path / "changed"], four)
    assert found[0] == []
    assert len(found[1]) == 1
    assert "moe.down" in found[1][0]
