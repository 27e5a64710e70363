"""The faults that are drawn: an example of each kind, and none where a test should not detect it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.faults import Fault, fault_of, slips_of
from tests.mutants.forks import SOURCES


def faults_in(folder: Path, text: str) -> list[Fault]:
    path = folder / "of.py"
    path.write_text(text, encoding="utf-8")
    return [fault for slip in slips_of(path) if (fault := fault_of(slip, folder)) is not None]


@pytest.mark.parametrize(
    ("kind", "line", "wrong"),
    [
        ("compare", "x = a <= b", ["x = (a < b)"]),
        ("compare", "x = a not in b", ["x = (a in b)"]),
        ("logic", "x = a and not b", ["x = ((a) or (not b))", "x = a and (b)"]),
        ("logic", "if a: x = b", ["if False: x = b"]),
        ("arithmetic", "x = a - b", ["x = ((a) + (b))"]),
        ("arithmetic", "x = a // b", ["x = (-(-(a) // (b)))"]),
        ("name", "x = ceil(min(a, b))", ["x = floor(min(a, b))", "x = ceil(max(a, b))"]),
        ("name", "x = sorted(a)", ["x = list(a)"]),
        ("constant", "x = f(a, 3, deep=True)", ["x = f(a, 4, deep=True)", "x = f(a, 3, deep=False)"]),
        ("filter", "x = [y for y in a if y if b]", ["x = [y for y in a if b]", "x = [y for y in a if y]"]),
        ("choice", "x = a if b else c", ["x = (a)", "x = (c)"]),
        ("statement", "a.append(b)", ["pass"]),
        ("order", "x = f(a, b, c)", ["x = f(b, a, c)"]),
        ("order", "x = (a, b)", ["x = (b, a)"]),
        ("bound", "x = a[b:]", ["x = a[(b) + 1:]", "x = a[:]"]),
    ],
)
def test_a_fault_is_one_slip(kind: str, line: str, wrong: list[str], tmp_path: Path) -> None:
    found = [fault for fault in faults_in(tmp_path, f"def f(a, b, c):\n    {line}\n") if fault.kind == kind]
    assert [fault.new for fault in found] == wrong
    assert {(fault.function, fault.old, fault.lines) for fault in found} == {("f", line, (2, 2))}


@pytest.mark.parametrize(
    "text",
    [
        "LIMIT = 3 if 4 > 5 else 6\n",
        "class A:\n    x: int = 3\n",
        "def f(a: int = 3) -> int:\n    return a\n",
        "def f(a):\n    assert a > 3, a - 1\n",
        "def f(a):\n    raise ValueError(f'{a - 1}')\n",
        "def f(a):\n    return zip(a, strict=True)\n",
        "def f(a):\n    return 'of ' + a\n",
    ],
)
def test_code_that_no_test_should_check_has_no_faults(text: str, tmp_path: Path) -> None:
    assert faults_in(tmp_path, text) == []


def test_positions_after_wide_letters_and_in_nested_functions(tmp_path: Path) -> None:
    text = "def f(a):\n    def g(b):\n        return 'ä→', b < 3\n    return g\n"
    (fault,) = [one for one in faults_in(tmp_path, text) if one.kind == "compare"]
    assert (fault.function, fault.new) == ("f.g", "return 'ä→', (b <= 3)")


def test_every_fault_of_a_file_is_python_and_another_file() -> None:
    path = SOURCES / "core" / "plan" / "movement.py"
    source = path.read_text(encoding="utf-8")
    slips = list(slips_of(path))
    assert len(slips) > 50
    found = [fault for slip in slips[::10] if (fault := fault_of(slip, SOURCES)) is not None]
    assert len(found) > 5
    for fault in found:
        assert ast.dump(ast.parse(fault.text)) != ast.dump(ast.parse(source)), fault.new
        assert fault.old != fault.new
        assert fault.file == "core/plan/movement.py"
