"""`train --weights`: a run begins with the weights of a checkpoint, and can be exported for transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.checkpoint import Checkpoint, latest
from shardwright.cli.main import main
from shardwright.training.optimizer import FIRST, SECOND
from tests.engine_jax.logits import our_logits
from tests.interop.published_folder import SMALL, Made, loaded_again, made_folder
from tests.models.published import LENGTH, ROWS, TOLERANCE
from tests.typed import once

SETTINGS = {**SMALL, "embed": "64", "mlp": "128", "num_layers": "2", "vocab": "320"}
MODEL = ["llama3-test", "--set", *(f"{name}={value}" for name, value in SETTINGS.items())]
TRAIN = ["--batch", "8", "--length", "64", "--dtype", "float32", "--json"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.chdir(tmp_path)
    found = made_folder(tmp_path / "folder", "llama3-test", SETTINGS)
    assert main(["ckpt", "import", "huggingface", "folder", "--out", "start", "--json"]) == 0
    return found


def newest(out: str) -> Checkpoint:
    checkpoint = latest(out).checkpoint
    assert checkpoint is not None
    return checkpoint


def train(*arguments: str) -> int:
    return main(once(["train", *MODEL, *TRAIN, *arguments]))


@pytest.mark.parametrize(
    "engine", [["--layout", "fsdp", "--mesh", "fsdp=4"], ["--layout", "fsdp", "--mesh", "fsdp=1", "--engine", "torch"]]
)
def test_a_run_begins_with_the_weights(engine: list[str], made: Made) -> None:
    # So small a learning rate changes no weight by more than its last bits.
    still = ["--steps", "1", "--lr", "1e-30", "--weights", "start"]
    assert train(*engine, *still, "--out", "run") == 0
    run = newest("run")
    assert run.point.step == 1
    for name in made.weights:
        assert np.array_equal(run.read_box(name), newest("start").read_box(name)), name
    # The moments of the first step: a tenth of the clipped gradient, so none of them is left from elsewhere.
    assert all(np.isfinite(run.read_box(FIRST + name)).all() for name in made.weights)
    # From the weights of a run, whose moments are not read.
    assert train("--layout", "tp", "--mesh", "data=1,tensor=2", *still[:-1], "run", "--out", "again") == 0
    assert newest("again").point.step == 1
    for prefix in (FIRST, SECOND):
        for name in made.weights:
            np.testing.assert_allclose(
                newest("again").read_box(prefix + name), run.read_box(prefix + name), rtol=1e-3, atol=1e-6
            )


def test_trained_exported_and_loaded_by_transformers(made: Made) -> None:
    assert (
        train(
            "--layout", "fsdp", "--mesh", "fsdp=8", "--steps", "3", "--lr", "1e-2", "--weights", "start", "--out", "run"
        )
        == 0
    )
    assert main(["ckpt", "export", "huggingface", "run", "--out", "back", "--config", "folder/config.json"]) == 0
    run = newest("run")
    weights = {name: run.read_box(name) for name in made.weights}
    assert not np.allclose(weights["layers.mlp.up"], made.weights["layers.mlp.up"])
    tokens = np.random.default_rng(1).integers(0, made.table.sizes["vocab"], (ROWS, LENGTH))
    with torch.no_grad():
        theirs = loaded_again(Path("back"))(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(our_logits(made.table, weights, {"tokens": tokens}), theirs, rtol=0, atol=TOLERANCE)


def test_resuming_reads_no_other_weights(made: Made) -> None:
    layout = ["--layout", "fsdp", "--mesh", "fsdp=2", "--steps", "3", "--out", "run"]
    assert train(*layout, "--weights", "start", "--stop-after", "1") == 0
    assert train(*layout, "--resume") == 0
    assert newest("run").point.step == 3
    assert newest("run").tensors.keys() >= set(made.weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        ("--weights", "nowhere"): "--weights: nowhere: there is no checkpoint here.",
        ("--weights", "start", "--set", "rope.theta=1e4"): "  rope.theta: 500000.0, not 10000.0",
        ("--weights", "start", "--weights-dtype", "bfloat16"): "is stored in float32, and this run has it in bfloat16.",
    }.items(),
)
def test_weights_that_do_not_fit(
    arguments: tuple[str, ...], message: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made.path.exists()
    capsys.readouterr()
    assert train("--layout", "fsdp", "--mesh", "fsdp=2", "--steps", "1", "--out", "run", *arguments) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not Path("run").exists() or latest("run").checkpoint is None


def test_a_run_that_saved_nothing_does_not_forget_its_weights(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "fsdp", "--mesh", "fsdp=2", "--steps", "2", "--out", "run"]
    assert train(*layout, "--weights", "start", "--stop-after", "1") == 0
    # As if it was killed before it saved.
    shutil.rmtree("run/checkpoints")
    assert made.path.exists()
    capsys.readouterr()
    assert train(*layout, "--resume") == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == (
        "--resume: the run in run saved nothing, and it began with the weights of start. Give them again with --weights, or "
        "begin anew with another --out."
    )
    assert train(*layout, "--resume", "--weights", "start") == 0
    assert newest("run").point.step == 2


def test_damaged_weights(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = newest("start")
    stored = next(box for box in checkpoint.parts.stored(0) if box.info.name == "layers.mlp.up")
    with (checkpoint.directory / stored.file).open("r+b") as file:
        file.seek(stored.offset + 5)
        file.write(b"!")
    assert made.path.exists()
    capsys.readouterr()
    assert train("--layout", "fsdp", "--mesh", "fsdp=2", "--steps", "1", "--out", "run", "--weights", "start") == 2
    assert "tensor 'layers.mlp.up', box [0:2,0:64,0:128]" in json.loads(capsys.readouterr().out)["error"]["message"]
