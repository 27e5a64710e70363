"""Every example in a docstring of src runs and prints the expected output."""

from __future__ import annotations

import doctest
import importlib
import types
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.layers import modules

# Modules of engines import JAX; the examples run on the same eight devices as the tests.
pytestmark = pytest.mark.devices

MODULES = [name for name in modules(ROOT / "src") if not name.endswith("__main__")]


def failures(module: types.ModuleType) -> list[str]:
    """The output of each failing example of a module."""
    written: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
        runner.run(test, out=written.append)
    return written


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    wrong = failures(importlib.import_module(name))
    assert not wrong, "".join(wrong)


def test_a_wrong_example_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "liar.py").write_text('def two():\n    """\n    >>> two()\n    3\n    """\n    return 2\n')
    monkeypatch.syspath_prepend(tmp_path)
    wrong = "".join(failures(importlib.import_module("liar")))
    assert "Expected:\n    3\nGot:\n    2" in wrong
