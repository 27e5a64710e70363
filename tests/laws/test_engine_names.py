"""No layer that decides asks which engine there is, and the law detects those that do."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from shardwright.core.engines.engines import DEFAULT_ENGINE, ENGINES
from shardwright.core.engines.properties import EngineProperties
from shardwright.core.schedules.schedules import SCHEDULES
from tests.conftest import ROOT
from tests.laws.engine_names import DECIDING, HOME, engine_questions
from tests.laws.sources import python_files

FILES = python_files(ROOT)


def test_no_layer_that_decides_asks_for_an_engine() -> None:
    wrong = engine_questions(ROOT, FILES)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "question",
    [
        'plan.request.engine == "torch"',
        "request.engine != JAX",
        "engine in GATHERED_ONCE",
        "request.engine is DEFAULT_ENGINE",
        "(name, kernel.engine) == (name, other)",
        "SCHEDULES_OF[request.engine]",
        "SCHEDULES_OF.get(engine)",
        'engine.startswith("j")',
        "name == DEFAULT_ENGINE",
        "request.properties == ENGINES[other]",
        "request.properties.framework == word",
        "engine.title in TITLES",
        'name == "jax"',
        'Literal["torch", "other"]',
    ],
)
@pytest.mark.parametrize("layer", ["core/plan", "cost/steps", "search"])
def test_a_question_is_detected(tmp_path: Path, question: str, layer: str) -> None:
    file = tmp_path / f"src/shardwright/{layer}/asking.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def f(request, engine, name, other, word):\n    return {question}\n")
    assert any(f"{layer}/asking.py:2" in line for line in engine_questions(tmp_path, [file]))


def test_a_match_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "src/shardwright/core/asking.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f(request):\n    match request.engine:\n        case _:\n            return 1\n")
    assert engine_questions(tmp_path, [file]) == [
        "src/shardwright/core/asking.py:2: it compares an engine: read a property of it (core/engines/properties.py)"
    ]


@pytest.mark.parametrize(
    "reading",
    [
        "ENGINES[engine].merges_dims",
        "request.properties.one_program and length > 1",
        "chip.accelerator in engine.accelerators",
        "replace(request, engine=engine)",
        'f"{engine.title} does not run it"',
        'f"{request.engine}_attention_flops_per_s" in numbers',
    ],
)
def test_a_property_may_be_read(tmp_path: Path, reading: str) -> None:
    file = tmp_path / "src/shardwright/core/reading.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def f(request, engine, chip, length, numbers):\n    return {reading}\n")
    assert engine_questions(tmp_path, [file]) == []


def test_every_layer_of_the_law_is_there() -> None:
    there = {file.relative_to(ROOT).as_posix() for file in FILES}
    for layer in (*(f"src/shardwright/{one}/" for one in DECIDING), HOME):
        assert any(name.startswith(layer) for name in there), layer


def test_every_property_is_read() -> None:
    """What no file reads is no property: it decides nothing."""
    sources = {file: file.read_text(encoding="utf-8") for file in FILES}
    text = "\n".join(source for file, source in sources.items() if f"/{HOME}" not in file.as_posix())
    for property_ in fields(EngineProperties):
        assert re.search(rf"\.{property_.name}\b", text), property_.name


def test_every_lack_is_asked_for() -> None:
    lacks = {lack for engine in ENGINES.values() for lack in engine.lacks}
    checks = "\n".join(file.read_text(encoding="utf-8") for file in FILES if "core/checks/" in file.as_posix())
    for lack in sorted(lacks):
        assert f'"{lack}"' in checks, lack


def test_the_schedules_are_there_in_their_order() -> None:
    assert DEFAULT_ENGINE in ENGINES
    for engine in ENGINES.values():
        assert [name for name in SCHEDULES if name in engine.schedules] == [*engine.schedules]
