"""The field's terms, wherever something is said: no text uses a word that the glossary replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.glossary import banned, violations

PAGE = ROOT / "docs" / "glossary.md"
WORDS = banned(PAGE.read_text(encoding="utf-8"))
TEXTS = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.yaml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "tests" / "golden").rglob("*.txt")),
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
]


def test_no_text_uses_a_word_that_has_a_term() -> None:
    wrong = violations(TEXTS, ROOT, WORDS)
    assert not wrong, "\n".join([f"{len(wrong)} words", *wrong[:60]])


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", '"""Which axis cuts a dim."""\n', "a.py:1: 'cuts': write shard, shards, sharding, unsharded"),
        ("a.py", "x = 1  # the slope of it\n", "a.py:1: 'slope': write gradient, cotangent"),
        ("a.py", "\ndef dims_cut_by(axis): ...\n", "a.py:2: 'cut': write shard, shards, sharding, unsharded"),
        ("a.py", 'raise ValueError(f"{x} is\\n in parts")\n', "a.py:1: 'in parts': write partial"),
        ("a.md", "One line.\nThe sums are in parts.\n", "a.md:2: 'in parts': write partial"),
        ("a.md", "A `cut` that is quoted.\n", None),
        ("a.py", '"""A shortcut, and cutlery."""\n', None),
    ],
)
def test_the_law_can_fail(tmp_path: Path, name: str, text: str, found: str | None) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert violations([path], tmp_path, WORDS) == ([] if found is None else [found])


def test_the_table_has_the_words() -> None:
    assert {"cut", "slope", "in parts", "told", "chances", "sight", "micro-step", "crossing"} <= set(WORDS)
