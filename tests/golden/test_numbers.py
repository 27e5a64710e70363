"""The check of numbers in golden texts detects a changed number, and ignores changed words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.golden import numbers

SAME = "".join(f"line {number} of a text\n" for number in range(9))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with two golden texts, committed."""
    folder = tmp_path / "tests" / "golden"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text(SAME + "mlp 256 over tensor 3, unreduced: 85.33 on each\n")
    (folder / "b.txt").write_text("4 slices at links.py:120\n")
    who = ["-c", "user.name=A Name", "-c", "user.email=name@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "Texts"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    return folder


def test_words_may_change(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "a.txt").rename(repository / "c.txt")
    (repository / "c.txt").write_text(SAME + "mlp 256 over tensor 3, partial: 85.33 on each\n")
    (repository / "b.txt").write_text("4 shards at lowering/links.py:99\n")
    subprocess.run(["git", "add", "-A"], cwd=repository, check=True)
    assert numbers.main(["HEAD"]) == 0
    assert capsys.readouterr().out == "2 files have changed in words since HEAD, 0 of them in numbers\n"


def test_numbers_may_not_change(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "b.txt").write_text("5 shards at links.py:120\n")
    assert numbers.main(["HEAD"]) == 1
    assert "tests/golden/b.txt: no longer 4; now 5\n" in capsys.readouterr().out


def test_without_a_commit_the_usage_is_printed() -> None:
    assert numbers.main([]) == 2
