"""`shardwright calibrate`: what it refuses, and, in the matrix, a file that --chips takes on both engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main

COMMAND = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "shardwright: --repeats is 0, and must be at least 1.\n"),
        (
            ("--out", "missing/mine.toml"),
            "shardwright: --out missing/mine.toml: no file can be written there. Give the name of a file in a folder that exists.\n",
        ),
        (
            ("--out", "."),
            "shardwright: --out .: no file can be written there. Give the name of a file in a folder that exists.\n",
        ),
    ],
)
def test_refused_before_anything_is_measured(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = arguments if "--out" in arguments else ("--out", "mine.toml", *arguments)
    assert main(["calibrate", "llama3-test", "--layout", "fsdp", "--mesh", "fsdp=2", *given]) == 2
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_file_of_this_machine(engine: str, tmp_path: Path):
    plan = ["llama3-test", "--engine", engine, "--layout", "fsdp", "--mesh", "fsdp=2", "--batch", "2", "--length", "32"]
    plan += ["--set", "num_layers=5"]
    file = tmp_path / "mine.toml"
    command = [sys.executable, "-c", COMMAND]
    calibrate = [*command, "calibrate", *plan, "--repeats", "2", "--out", str(file), "--json"]
    found = json.loads(subprocess.run(calibrate, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert [one["layers"] for one in found["estimates"]] == [1, 3, 5]
    assert all(one["before_seconds"] is None and one["after_seconds"] > 0 for one in found["estimates"])
    planned = [*command, "plan", *plan, "--chips", f"cpu:2+{file}", "--json"]
    step = json.loads(subprocess.run(planned, check=True, stdout=subprocess.PIPE, text=True).stdout)["step"]
    assert step["seconds"] == pytest.approx(found["estimates"][-1]["after_seconds"], rel=1e-4)
