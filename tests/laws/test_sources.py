"""The laws about source files hold, and each detects a file that violates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.sources import (
    MAX_LINES,
    dims_without_legend,
    knowing_a_family,
    mutable_dataclasses,
    named_after_nothing,
    python_files,
    refusing_engines,
    too_long,
    typed_rows,
    without_docstring,
)

FILES = python_files(ROOT)


def test_the_sources_are_found() -> None:
    assert {ROOT / "src" / "shardwright" / "core" / "mesh" / "mesh.py", Path(__file__)} <= set(FILES)


@pytest.mark.parametrize(
    "law",
    [
        too_long,
        named_after_nothing,
        without_docstring,
        mutable_dataclasses,
        refusing_engines,
        dims_without_legend,
        typed_rows,
        knowing_a_family,
    ],
)
def test_law_holds(law: Callable[[Path, Iterable[Path]], list[str]]) -> None:
    wrong = law(ROOT, FILES)
    assert not wrong, "\n".join(wrong)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_long_file_is_noticed(tmp_path: Path) -> None:
    fits = write(tmp_path, "src/fits.py", "x\n" * MAX_LINES)
    long = write(tmp_path, "src/long.py", "x\n" * (MAX_LINES + 1))
    assert too_long(tmp_path, [fits, long]) == ["src/long.py has 401 lines, 400 at most: look for the second concept"]
    assert too_long(tmp_path, [fits, long], {"src/long.py": 401}) == []


def test_an_exception_that_is_not_needed_is_noticed(tmp_path: Path) -> None:
    short = write(tmp_path, "src/short.py", "x\n" * 410)
    assert too_long(tmp_path, [short], {"src/short.py": 500, "src/gone.py": 450}) == [
        "src/short.py has 410 lines now: shorten its entry or take it off the list",
        "src/gone.py has 0 lines now: shorten its entry or take it off the list",
    ]


@pytest.mark.parametrize(
    "name", ["utils.py", "jax_utils.py", "common/x.py", "mesh_helpers.py", "manager.py", "misc.py"]
)
def test_a_name_that_says_nothing_is_noticed(tmp_path: Path, name: str) -> None:
    assert named_after_nothing(tmp_path, [tmp_path / "src" / name]) == [
        f"src/{name}: name it after the one thing it holds"
    ]


def test_a_name_that_says_something_is_left_alone(tmp_path: Path) -> None:
    assert (
        named_after_nothing(tmp_path, [tmp_path / "src" / "commonwealth.py", tmp_path / "src" / "utilisation.py"]) == []
    )


def test_a_missing_docstring_is_noticed(tmp_path: Path) -> None:
    with_one = write(tmp_path, "a.py", '"""What it is."""\n')
    without = write(tmp_path, "b.py", "x = 1\n")
    assert without_docstring(tmp_path, [with_one, without]) == ["b.py has no docstring"]


def test_a_mutable_dataclass_is_noticed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.py",
        "@dataclass\nclass A: ...\n@dataclass(frozen=True)\nclass B: ...\n@dataclass(frozen=True, slots=True)\nclass C: ...\n",
    )
    assert mutable_dataclasses(tmp_path, [path]) == [
        "a.py:2: A needs frozen=True",
        "a.py:2: A needs slots=True",
        "a.py:4: B needs slots=True",
    ]


def test_an_engine_that_refuses_is_noticed(tmp_path: Path) -> None:
    names = ("engine_jax/support.py", "engine_torch/training/run.py", "core/checks/engines.py")
    files = [write(tmp_path, f"src/shardwright/{name}", "raise InputError('no')\n") for name in names]
    assert refusing_engines(tmp_path, files) == [
        "src/shardwright/engine_jax/support.py: an engine refuses: make it a finding of the plan (core/checks/engines.py)"
    ]


def test_a_shape_suffix_without_a_legend_is_noticed(tmp_path: Path) -> None:
    text = '"""A product. B batch, M embed."""\ndef product(x_BM, kernel_MF):\n    LIMIT_OF = 1\n    return x_BM @ kernel_MF\n'
    file = write(tmp_path, "src/shardwright/engine_jax/layers/product.py", text)
    assert dims_without_legend(tmp_path, [file]) == [
        "src/shardwright/engine_jax/layers/product.py: its docstring does not say which dims F are"
    ]
    write(tmp_path, "src/shardwright/engine_jax/layers/product.py", text.replace("M embed", "M embed, F mlp"))
    assert dims_without_legend(tmp_path, [file]) == []


def test_a_row_that_is_typed_is_noticed(tmp_path: Path) -> None:
    files = [
        write(
            tmp_path, "src/shardwright/models/layers/a.py", "row(name='x', contracted=(), hugging_face='x.weight')\n"
        ),
        write(tmp_path, "src/shardwright/models/layers/b.py", "attention.product('B L M, M F -> B L F', x, 'up')\n"),
        write(tmp_path, "src/shardwright/core/program/rows.py", "row(contracted=())\n"),
    ]
    assert typed_rows(tmp_path, files) == [
        "src/shardwright/models/layers/a.py types contracted, hugging_face: it follows from the program"
    ]


def test_an_engine_that_knows_a_family_is_noticed(tmp_path: Path) -> None:
    text = 'from shardwright.models.parts.architecture import Experts\nlinks.move("residual.stream", name)\n'
    files = [
        write(tmp_path, "src/shardwright/engine_jax/layers/a.py", text),
        write(tmp_path, "src/shardwright/engine_jax/io/b.py", text),
        write(
            tmp_path, "src/shardwright/engine_jax/model/c.py", '"""Of ``residual.stream``."""\nlinks.move(take.row)\n'
        ),
    ]
    assert knowing_a_family(tmp_path, files) == [
        "src/shardwright/engine_jax/layers/a.py types 'residual.stream': it is in the walk",
        "src/shardwright/engine_jax/layers/a.py imports shardwright.models.parts.architecture: a primitive knows no family",
    ]
