"""Runs that save in the background, killed at random moments: the newest complete checkpoint is found, bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.matrix import rest


def killed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.runs.killing", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("processes", "kills"), [rest(1, 6), (3, 4)])
def test_runs_that_are_killed_while_they_save_in_the_background(tmp_path: Path, processes: int, kills: int) -> None:
    ended = killed(tmp_path, "--processes", str(processes), "--kills", str(kills))
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    phases, _ = ended.stdout.splitlines()
    assert sum(map(int, re.findall(r"\d+", phases))) == kills


@pytest.mark.matrix
def test_an_unsafe_store_is_detected(tmp_path: Path) -> None:
    ended = killed(tmp_path, "--kills", "100", "--fault", "renamed before it is whole")
    assert ended.returncode == 1, ended.stdout
    assert "AssertionError: kill " in ended.stderr
