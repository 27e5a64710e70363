"""A package that is not installed: the message names the smallest extra that has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoint.states import save, small_state
from tests.conftest import ROOT

WITHOUT = """
import sys
absent, *arguments = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent.split(",")))
from shardwright.cli.main import main
sys.exit(main(arguments))
"""
FRAMEWORKS = "jax,jaxlib,torch,optax,grain,tokenizers,safetensors,transformers"


def run_without(absent: str, arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, absent, *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("arguments", ["ckpt verify run", "ckpt export huggingface run --out back"])
def test_a_checkpoint_needs_the_extra_for_checkpoints(arguments, user_environment) -> None:
    done = run_without("numpy," + FRAMEWORKS, arguments, user_environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "needs the package 'numpy', which is not installed. Install it with: pip install 'shardwright[checkpoint]'\n"
    )


def test_a_checkpoint_needs_no_more_than_that_extra(user_environment, tmp_path) -> None:
    save(tmp_path / "run", small_state(), step=3)
    assert 'checkpoint = ["numpy>=2.1", "xxhash>=3.5"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    done = run_without(FRAMEWORKS, f"ckpt verify {tmp_path / 'run'}", user_environment)
    assert (done.returncode, done.stderr) == (0, "")
