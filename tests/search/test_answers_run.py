"""Answers of searches are trained: two steps of twenty drawn ones, on the engine that was asked, with the losses of one device."""

from __future__ import annotations

import json
import random
from functools import cache
from math import isfinite
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.cli.searching.rows import Row, rows_of
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.layouts import load_layout, preset_names
from shardwright.search.answers import answered
from shardwright.search.searching import Search
from shardwright.search.solving import Solver
from shardwright.search.space.policies import policies_of
from shardwright.search.space.settings import Free
from shardwright.search.space.space import Space, space_of
from tests.matrix import rest

SEED = 3706
BATCH, LENGTH = 16, 64
TRIED = 24
"""Layouts of a search, drawn: with all of them the answers of a model are much alike."""

SEARCHES = {
    ("llama3-test", "h100:2x4", "jax"): 2,
    ("llama3-test", "v5e:2x4", "jax"): 2,
    ("mixtral-test", "h100:2x4", "jax"): 2,
    ("mixtral-test", "v5e:2x4", "jax"): 2,
    ("deepseek3-test", "h100:2x4", "jax"): 2,
    ("deepseek3-test", "v5e:2x4", "jax"): 2,
    ("llama3-test", "h100:1x8", "torch"): 3,
    ("mixtral-test", "h100:2x4", "torch"): 3,
    ("deepseek3-test", "h100:2x4", "torch"): 2,
}
"""How many answers of each search are trained."""

CASES = [(*search, number) for search, drawn in SEARCHES.items() for number in range(drawn)]


@cache
def answers(model: str, chips: str, engine: str) -> tuple[Row, ...]:
    """What is drawn of the answers of a search."""
    draw = random.Random(f"{SEED} {model} {chips} {engine}")
    options = PlanOptions(chips=chips, engine=engine, batch=BATCH, length=LENGTH)
    typed = typed_request(model, "fsdp", options)
    machine = typed.machine
    assert machine is not None
    space = space_of(typed.request, machine)
    arrangements = draw.sample(list(space.arrangements), min(TRIED, len(space.arrangements)))
    solver = Solver(
        request=typed.request, machine=machine, free=Free(policies=policies_of(typed.request.table, to_host=True))
    )
    search = Search(solver, Space(arrangements=tuple(arrangements), ended={}, smallest=None), keep=TRIED)
    rows = rows_of(
        answered(solver, search.run().answers), model, options, [load_layout(name) for name in preset_names()], None
    )
    return tuple(draw.sample(rows, SEARCHES[model, chips, engine]))


def losses(model: str, words: list[str], out: Path) -> list[float]:
    assert main(["train", model, *words, "--steps", "2", "--out", str(out)]) == 0, words
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def of_one_device() -> dict[str, list[float]]:
    """The losses of models by one device, filled as they are needed."""
    return {}


@pytest.mark.parametrize(("model", "chips", "engine", "number"), [rest(*case) for case in CASES])
def test_an_answer_trains_two_steps(
    model: str, chips: str, engine: str, number: int, of_one_device: dict[str, list[float]], tmp_path: Path
) -> None:
    if model not in of_one_device:
        words = f"--layout fsdp --mesh fsdp=1 --batch {BATCH} --length {LENGTH}".split()
        of_one_device[model] = losses(model, words, tmp_path / "one")
    row = answers(model, chips, engine)[number]
    words = list(row.words[3:])
    words[words.index("--chips") : words.index("--chips") + 2] = []
    if row.file is not None:
        (tmp_path / row.name).write_text(row.file, encoding="utf-8")
        words[words.index("--layout") + 1] = str(tmp_path / row.name)
    trained = losses(model, words, tmp_path / "run")
    assert len(trained) == 2
    assert all(isfinite(loss) for loss in trained)
    assert trained == pytest.approx(of_one_device[model], rel=2e-3), row.command


def test_twenty_answers_are_drawn() -> None:
    assert len(CASES) == 20
    assert {case[2] for case in CASES} == {"jax", "torch"}
