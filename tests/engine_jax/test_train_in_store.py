"""`train --checkpoints s3://...` and `--resume` by the command line: the bits of a run whose checkpoints are on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.checkpoint import describe
from shardwright.cli.main import main
from tests.engine_jax.commands import (
    LLAMA3,
    assert_same_bits,
    compiled_once,
    results,
    saved,
    saved_in,
    train,
)
from tests.storage.s3 import Server

MESH = ["--layout", "fsdp", "--mesh", "fsdp=2"]
STEPS = ["--steps", "4", "--seed", "5", "--checkpoint-every", "2"]


def test_a_run_goes_on_from_a_store(s3: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del s3
    url = "s3://bucket/jax-run"
    here, out = tmp_path / "here", tmp_path / "out"
    with compiled_once():
        assert train(LLAMA3, here, *MESH, *STEPS) == 0
        assert train(LLAMA3, out, *MESH, *STEPS, "--checkpoints", url, "--stop-after", "2") == 0
        assert not (out / "checkpoints").exists()
        capsys.readouterr()
        # Where the checkpoints are is not guessed.
        assert train(LLAMA3, out, *MESH, *STEPS, "--resume") == 2
        assert f"Give --checkpoints {url}." in capsys.readouterr().err
        assert train(LLAMA3, out, *MESH, *STEPS, "--checkpoints", f"{url}/", "--resume") == 0
    assert f"resumed from {url}/checkpoints/step-00000002" in capsys.readouterr().out
    assert results(out) == results(here)
    assert_same_bits(saved_in(f"{url}/checkpoints/step-00000004"), saved(here, 4))
    assert main(["ckpt", "verify", url, "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [4, 2]


@pytest.mark.matrix
def test_weights_from_a_store_begin_a_run_that_saves_there_in_the_background(s3: Server, tmp_path: Path) -> None:
    del s3
    url, steps = "s3://bucket/jax-weights", ["--steps", "2", "--seed", "5", "--checkpoint-every", "1"]
    assert train(LLAMA3, tmp_path / "first", *MESH, *steps, "--checkpoints", url) == 0
    again = [*steps, "--weights", url, "--async-checkpoints", "--keep", "1"]
    assert train(LLAMA3, tmp_path / "here", *MESH, *again) == 0
    assert train(LLAMA3, tmp_path / "there", *MESH, *again, "--checkpoints", f"{url}-new") == 0
    assert results(tmp_path / "there") == results(tmp_path / "here")
    assert_same_bits(saved_in(f"{url}-new/checkpoints/step-00000002"), saved(tmp_path / "here", 2))
    assert [one["step"] for one in describe(f"{url}-new")["checkpoints"]] == [2]
