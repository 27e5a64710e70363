"""A resumed run gives the same numbers as one without a stop: bitwise equal on the same layout, and close on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import open_checkpoint
from tests.checkpoint.states import largest_file
from tests.engine_jax.commands import (
    CP,
    DEEPSEEK3,
    EP_AS_CP,
    FSDP,
    HSDP,
    LLAMA3,
    assert_close,
    assert_same_bits,
    checkpoints,
    compiled_once,
    directory_of,
    flip,
    losses,
    metrics,
    results,
    saved,
    train,
)

STEPS = ["--steps", "12", "--seed", "5", "--lr", "3e-3"]
HEAD_TO_TAIL = ["--move", "attention=ring", "--load-balance"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A folder with a run of 12 steps, ``straight``, and one that was stopped after 6, ``half``."""
    folder = tmp_path_factory.mktemp("dense")
    with compiled_once():
        assert train(LLAMA3, folder / "straight", *FSDP, *STEPS, "--checkpoint-every", "6") == 0
        assert train(LLAMA3, folder / "half", *FSDP, *STEPS, "--stop-after", "6") == 0
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    with compiled_once():
        assert train(DEEPSEEK3, folder / "straight", *EP_AS_CP, *STEPS) == 0
        assert train(DEEPSEEK3, folder / "half", *EP_AS_CP, *STEPS, "--stop-after", "6") == 0
    return folder


def copied(folder: Path, out: Path) -> Path:
    """A copy of the stopped run, to resume."""
    return Path(shutil.copytree(folder / "half", out))


def test_half_a_run_is_the_first_half_of_the_full_run(dense: Path) -> None:
    assert results(dense / "half") == results(dense / "straight")[:6]
    assert checkpoints(dense / "half") == ["step-00000006"]
    assert checkpoints(dense / "straight") == ["step-00000006", "step-00000012"]
    assert_same_bits(saved(dense / "half", 6), saved(dense / "straight", 6))


def test_the_loss_falls(dense: Path, experts: Path) -> None:
    for folder in (dense, experts):
        values = losses(folder / "straight")
        assert values[0] == pytest.approx(np.log(2048), abs=0.1)
        assert values[-1] < values[0] - 0.5


@pytest.mark.parametrize(("model", "layout", "runs"), [(LLAMA3, FSDP, "dense"), (DEEPSEEK3, EP_AS_CP, "experts")])
def test_resumed_on_the_same_layout_it_is_bitwise_equal(model, layout, runs, request, tmp_path: Path) -> None:
    folder = request.getfixturevalue(runs)
    out = copied(folder, tmp_path / "out")
    assert train(model, out, *layout, *STEPS, "--resume") == 0
    assert results(out) == results(folder / "straight")
    assert_same_bits(saved(out, 12), saved(folder / "straight", 12))
    straight, ours = (open_checkpoint(directory_of(place, 12)).point for place in (folder / "straight", out))
    assert ours == straight


@pytest.mark.parametrize(
    ("model", "layout", "runs", "tolerance"),
    [
        pytest.param(LLAMA3, HSDP, "dense", 1e-5, id="llama3: fsdp, then hsdp"),
        pytest.param(
            LLAMA3,
            [*CP, *HEAD_TO_TAIL],
            "dense",
            1e-5,
            id="llama3: fsdp, then rows head to tail around a ring",
            marks=pytest.mark.matrix,
        ),
        pytest.param(DEEPSEEK3, HSDP, "experts", 1e-4, id="deepseek3: ep-as-cp, then hsdp", marks=pytest.mark.matrix),
    ],
)
def test_resumed_on_another_layout_it_is_close(model, layout, runs, tolerance, request, tmp_path: Path) -> None:
    folder = request.getfixturevalue(runs)
    out = copied(folder, tmp_path / "out")
    assert train(model, out, *layout, *STEPS, "--resume") == 0
    assert results(out)[:6] == results(folder / "straight")[:6]
    np.testing.assert_allclose(losses(out), losses(folder / "straight"), rtol=tolerance, atol=0)
    assert [line["tokens"] for line in metrics(out)] == [line["tokens"] for line in metrics(folder / "straight")]
    assert_close(saved(out, 12), saved(folder / "straight", 12), 1e-3)


def test_a_finished_run_has_nothing_to_do(dense: Path, capsys) -> None:
    before = results(dense / "straight")
    assert train(LLAMA3, dense / "straight", *FSDP, *STEPS, "--resume") == 0
    assert "nothing to do: 12 steps are done, and this run ends at 12" in capsys.readouterr().out
    assert results(dense / "straight") == before


CHANGED = {
    "seed": ("--seed", "6", "  seed: was 5, is 6; --seed 5 keeps it\n", " So may seed, with --change seed."),
    "steps": ("--steps", "13", "  steps: was 12, is 13; --steps 12 keeps it\n", " So may steps, with --change steps."),
    "lr": ("--lr", "0.002", "  lr: was 0.003, is 0.002; --lr 0.003 keeps it\n", " So may lr, with --change lr."),
    "batch": ("--batch", "16", "  batch: was 8, is 16; --batch 8 keeps it\n", " So may batch, with --change batch."),
    "an option that changes no shape": (
        "--set",
        "rope.theta=9",
        "  architecture.rope.theta: was 500000.0, is 9.0\n",
        "",
    ),
}


@pytest.mark.parametrize(("option", "value", "said", "may"), CHANGED.values(), ids=CHANGED)
def test_another_run_is_not_resumed(option, value, said, may, dense: Path, capsys) -> None:
    out = dense / "half"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert train(LLAMA3, out, *FSDP, *STEPS, "--resume", option, value) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {directory_of(out, 6)} was saved by a run with other options or text; going on would be another run:\n"
        f"{said}"
        f"Give the same options, or another --out. The layout and the mesh may change.{may}\n"
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_second_run_does_not_replace_the_first(dense: Path, capsys) -> None:
    out = dense / "half"
    assert train(LLAMA3, out, *FSDP, *STEPS) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {out} already holds a run. Give --resume to go on with it, or another --out for a new one.\n"
    )


def test_a_run_that_saved_nothing_begins_again_with_resume(dense: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.0}) + "\n")
    assert train(LLAMA3, tmp_path, *FSDP, *STEPS) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {tmp_path} already holds a run, which saved nothing. Give --resume to begin it again, or another "
        "--out.\n"
    )
    with compiled_once():
        assert train(LLAMA3, tmp_path, *FSDP, *STEPS, "--stop-after", "6", "--resume") == 0
    assert f"the run in {tmp_path} saved nothing: it begins again" in " ".join(capsys.readouterr().out.split())
    assert results(tmp_path) == results(dense / "half")


def test_a_flipped_bit_in_the_newest_checkpoint_costs_only_that_checkpoint(dense: Path, tmp_path: Path, capsys) -> None:
    out = Path(shutil.copytree(dense / "straight", tmp_path / "out"))
    flip(directory_of(out, 12))
    assert train(LLAMA3, out, *FSDP, *STEPS, "--resume", "--json") == 0
    said = json.loads(capsys.readouterr().out)["run"]["said"]
    assert said[1].startswith(f"skipped a damaged checkpoint: {directory_of(out, 12)}/boxes-")
    assert said[2] == f"resumed from {directory_of(out, 6)} (layout fsdp)"
    (aside,) = (out / "checkpoints").glob("step-00000012.damaged-*")
    assert said[3:] == [f"kept under another name, damaged: {aside}"]
    assert results(out) == results(dense / "straight")
    assert_same_bits(saved(out, 12), saved(dense / "straight", 12))


def test_a_full_disk_costs_only_the_checkpoint_that_is_written(dense: Path, tmp_path: Path, capsys) -> None:
    out = copied(dense, tmp_path / "out")
    before = saved(out, 6)
    with compiled_once(), largest_file(50_000):
        assert train(LLAMA3, out, *FSDP, *STEPS, "--resume", "--checkpoint-every", "2") == 2
    assert capsys.readouterr().err == (
        f"shardwright: {directory_of(out, 8)}: this checkpoint could not be written: File too large. Free some space, then "
        f"go on with --resume. Nothing of it was kept, and earlier checkpoints are as they were.\n"
    )
    assert checkpoints(out) == ["step-00000006"]
    assert_same_bits(saved(out, 6), before)
    assert results(out) == results(dense / "straight")[:8]
