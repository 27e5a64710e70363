"""SIGKILL at random moments of saves: the last complete checkpoint loads bit for bit, and nothing less is taken for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import rest

ROOT = Path(__file__).parents[2]


def killed(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.checkpoint.killing", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("writers", [1, 3])
def test_killed_at_random_moments(tmp_path: Path, writers: int) -> None:
    """One process that saves, and three that save jointly, of which all are killed or any one of them."""
    ended = killed(tmp_path, "--writers", str(writers), "--kills", "20")
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert "writing" in ended.stdout


@pytest.mark.parametrize("fault", ["renamed before it is whole", rest("deleted under its name")])
def test_an_unsafe_store_is_detected(tmp_path: Path, fault: str) -> None:
    ended = killed(tmp_path, "--kills", "400", "--fault", fault)
    assert ended.returncode == 1, ended.stdout
    assert "AssertionError: {'directory'" in ended.stderr
    assert "'ok': False" in ended.stderr
