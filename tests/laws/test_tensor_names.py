"""No layer that decides types the name of a tensor, and the law detects those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.models import build
from tests.conftest import ROOT
from tests.laws.sources import python_files
from tests.laws.tensor_names import NAMELESS, PARTS, TYPED, typed_names

FILES = python_files(ROOT)


def test_no_layer_that_decides_types_a_name() -> None:
    wrong = typed_names(ROOT, FILES)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "typed",
    [
        'rows["attention.queries"]',
        'rows.get("moe_layers.moe.up")',
        'name == "shared.hidden"',
        'f"attention.{name}attended"',
    ],
)
@pytest.mark.parametrize("layer", NAMELESS)
def test_a_typed_name_is_detected(tmp_path: Path, layer: str, typed: str) -> None:
    file = tmp_path / f"src/shardwright/{layer}/typing.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def f(rows, name):\n    return {typed}\n")
    (wrong,) = typed_names(tmp_path, [file])
    assert wrong.startswith(f"src/shardwright/{layer}/typing.py:2: it types the tensor '")


def test_a_sentence_with_a_name_is_none(tmp_path: Path) -> None:
    file = tmp_path / "src/shardwright/core/text.py"
    file.parent.mkdir(parents=True)
    file.write_text('"""Of attention.queries."""\nHINT = "as keep=attention.output"\n')
    assert typed_names(tmp_path, [file]) == []


@pytest.mark.parametrize("name", TYPED)
def test_an_exception_is_needed(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    assert all(f'"{tensor}"' in source for tensor in TYPED[name])


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_names_of_tensors_begin_with_these_words(model: str) -> None:
    table = build(model)
    names = [*(row.name for row in table.activations), *(weight.name_in_layer for weight in table.weights)]
    assert {name.partition(".")[0] for name in names} <= {*PARTS}
