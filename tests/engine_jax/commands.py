"""Runs through the command line, in this process: the smallest models, on text that is on every machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.checkpoint import open_checkpoint
from shardwright.cli.main import main
from shardwright.engine_jax.training.run import JaxEngine
from tests.typed import once

TEXT = argparse.__file__
"""About 100 KB of the standard library."""

LLAMA3 = ["llama3-test", "--set", "num_layers=1", "embed=64", "mlp=128", "--length", "32", "--data", TEXT]
DEEPSEEK3 = ["deepseek3-test", "--set", "num_layers=1", "num_dense_layers=0", "--length", "32", "--data", TEXT]

FSDP = ["--layout", "fsdp", "--mesh", "fsdp=8"]
HSDP = ["--layout", "hsdp", "--mesh", "data=4,fsdp=2"]
CP = ["--layout", "cp", "--mesh", "fsdp=2,context=4"]
EP_AS_CP = ["--layout", "ep-as-cp", "--mesh", "fsdp=2,expert=4"]


def train(model: list[str], out: Path, *options: str) -> int:
    """The exit code of a training run."""
    return main(once(["train", *model, "--batch", "8", "--out", str(out), *options]))


def metrics(out: Path) -> list[dict[str, float]]:
    """The objects of ``metrics.jsonl``."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def results(out: Path) -> list[tuple[float, ...]]:
    """The results of every step, without its duration."""
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "tokens")) for line in metrics(out)]


def losses(out: Path) -> np.ndarray:
    return np.asarray([line["loss"] for line in metrics(out)])


def saved(out: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint."""
    return saved_in(directory_of(out, step))


def saved_in(directory: Path | str) -> dict[str, np.ndarray]:
    """Every array of the checkpoint in the directory of its step, or at its URL."""
    checkpoint = open_checkpoint(directory)
    return {name: checkpoint.read_box(name) for name in checkpoint.tensors}


def directory_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def flip(directory: Path) -> None:
    """Flip one bit of the elements of a checkpoint."""
    path = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 16
    path.write_bytes(data)


def checkpoints(out: Path) -> list[str]:
    """The names of the directories of checkpoints, complete or not."""
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir())


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        assert ours[name].shape == array.shape, name
        assert ours[name].tobytes() == array.tobytes(), name


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> None:
    """|ours - theirs| / |theirs| of every array."""
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.linalg.norm(ours[name] - array) <= tolerance * np.linalg.norm(array), name


@contextmanager
def compiled_once() -> Iterator[None]:
    """Runs of one plan and one schedule share their compiled step, for tests that do not test compilation."""
    compile_step, known = JaxEngine._compiled, {}

    def compiled(self: JaxEngine) -> jax.stages.Compiled:
        options = replace(
            self.options, out=Path(), checkpoints=None, stop_after=None, resume=False, checkpoint_every=None
        )
        key = repr((self.plan.request, options))
        if key not in known:
            known[key] = compile_step(self)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JaxEngine, "_compiled", compiled)
        yield
