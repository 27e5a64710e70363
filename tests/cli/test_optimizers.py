"""Optimizers and averages by name from the command line: in the plan, in checkpoints, on other layouts and engines, exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardwright.checkpoint import Checkpoint, open_checkpoint
from shardwright.cli.main import main
from shardwright.training.optimizers import OPTIMIZERS
from tests.matrix import rest

DIMS = ["num_layers=2", "embed=64", "num_heads=4", "num_kv_heads=2", "mlp=128", "vocab=320"]
MODEL = ["llama3-test", "--set", *DIMS]
OF_MODEL = ["--model", *MODEL]
SGD = ["--optimizer", "sgd", "--optimizer-set", "nesterov=true"]
AVERAGE = 0.6
FSDP = ["--layout", "fsdp", "--mesh", "fsdp=4"]
TORCH = ["--layout", "fsdp", "--mesh", "fsdp=1", "--engine", "torch"]


def train(folder: Path, *arguments: str, lr: str = "0.1") -> list[str]:
    """A command that trains on a text of its own, in the folder ``run``."""
    return [
        *("train", *MODEL, "--batch", "4", "--length", "32", "--data", str(folder / "text.txt"), "--steps", "4"),
        *("--lr", lr, "--out", str(folder / "run"), "--json", *arguments),
    ]


def with_text(folder: Path) -> Path:
    words = np.random.default_rng(0).choice(["layout", "mesh", "shard", "weight", "step"], 4000)
    (folder / "text.txt").write_text(" ".join(words))
    return folder


def of_step(folder: Path, step: int) -> Checkpoint:
    return open_checkpoint(folder / "run" / "checkpoints" / f"step-{step:08}")


def message_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    return json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on JAX, with a checkpoint after each."""
    folder = with_text(tmp_path_factory.mktemp("trained"))
    arguments = [*FSDP, *SGD, "--average", str(AVERAGE), "--checkpoint-every", "1"]
    assert main(train(folder, *arguments)) == 0
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_an_average_is_saved_as_the_mean_of_the_weights_of_each_step(trained: Path) -> None:
    last = of_step(trained, 4)
    weights = [name for name in last.tensors if "/" not in name]
    prefixes = ("", "optimizer/momentum/", "average/")
    assert set(last.tensors) == {prefix + name for prefix in prefixes for name in weights}
    shares = AVERAGE ** np.arange(3, -1, -1)
    for name in weights:
        each = np.stack([of_step(trained, step).read_box(name).astype(np.float64) for step in (1, 2, 3, 4)])
        expected = np.tensordot(shares / shares.sum(), each, axes=1)
        np.testing.assert_allclose(last.read_box(f"average/{name}"), expected, rtol=1e-5, atol=1e-7, err_msg=name)
        assert last.tensors[f"average/{name}"].spec == last.tensors[name].spec


def test_a_run_goes_on_with_its_optimizer_and_average_on_the_other_engine(copy: Path, trained: Path) -> None:
    assert main(train(copy, *TORCH, *SGD, "--average", str(AVERAGE), "--resume-from", "2")) == 0
    ours, theirs = of_step(copy, 4), of_step(trained, 4)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        np.testing.assert_allclose(ours.read_box(name), theirs.read_box(name), rtol=1e-3, atol=2e-5, err_msg=name)


def test_another_optimizer_and_another_average_are_other_runs(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = train(trained, *TORCH, "--resume")
    ours = "sgd momentum=0.9 nesterov=true"
    lines = message_of([*begin, "--optimizer", "lion"], capsys).splitlines()
    assert lines[1:3] == [
        f"  optimizer: was '{ours}', is 'lion b1=0.9 b2=0.99'",
        f"  average: was {AVERAGE}, is None; --average {AVERAGE} keeps it",
    ]
    may = "So may average, with --change average."
    anew = f"To begin anew with its weights, give --weights {of_step(trained, 4).directory} and another --out."
    assert lines[-1] == f"Give the same options, or another --out. The layout and the mesh may change. {may} {anew}"
    lines = message_of([*begin, *SGD, "--average", "0.9"], capsys).splitlines()
    assert lines[1:-1] == [f"  average: was {AVERAGE}, is 0.9; --average {AVERAGE} keeps it"]


def test_an_average_ends_and_begins_where_a_run_goes_on(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--change", "average", "--checkpoint-every", "1"]
    capsys.readouterr()
    assert main(train(copy, *TORCH, *SGD, *on, "--resume-from", "2", "--stop-after", "3")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert f"average: was {AVERAGE}, is none; from step 3 on, and the next checkpoint has none" in shown["run"]["said"]
    without = of_step(copy, 3)
    assert not any(name.startswith("average/") for name in without.tensors)
    assert main(train(copy, *FSDP, *SGD, *on, "--resume", "--average", "0.5")) == 0
    shown = json.loads(capsys.readouterr().out)
    line = "average: was none, is 0.5; from step 4 on, beginning with the weights of step 3"
    assert line in shown["run"]["said"]
    # As if the weights of step 3 had been those of steps 1 and 2 too.
    last, share = of_step(copy, 4), 0.5 / (1 - 0.5**4)
    for name in without.tensors:
        if "/" not in name:
            before, after = (one.read_box(name).astype(np.float64) for one in (without, last))
            expected = before + share * (after - before)
            np.testing.assert_allclose(last.read_box(f"average/{name}"), expected, rtol=1e-5, atol=1e-7, err_msg=name)
    # Another rate, on the other engine.
    assert main(train(copy, *TORCH, *SGD, *on, "--resume-from", "4", "--average", "0.9")) == 0


def test_a_new_run_with_another_optimizer_begins_with_the_weights_only(trained: Path, tmp_path: Path) -> None:
    folder = with_text(tmp_path)
    begun = ["--weights", str(trained / "run"), "--optimizer", "lion", "--average", "0.9"]
    assert main(train(folder, *TORCH, *begun, "--stop-after", "1", lr="1e-30")) == 0
    ours, theirs = of_step(folder, 1), of_step(trained, 4)
    for name in (name for name in ours.tensors if "/" not in name):
        np.testing.assert_array_equal(ours.read_box(name), theirs.read_box(name))
        # The average of one step is the weights after it; Lion's momentum is a hundredth of one clipped gradient.
        np.testing.assert_allclose(ours.read_box(f"average/{name}"), ours.read_box(name), rtol=1e-6)
        assert 0 <= np.abs(ours.read_box(f"optimizer/momentum/{name}")).max() <= 0.01


def test_an_average_is_exported_in_place_of_the_weights(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ["ckpt", "export", "huggingface", str(trained / "run"), *OF_MODEL, "--json", "--out"]
    capsys.readouterr()
    assert main([*export, str(tmp_path / "average"), "--average"]) == 0
    shown = json.loads(capsys.readouterr().out)
    last = of_step(trained, 4)
    num_weights = sum("/" not in name for name in last.tensors)
    assert (shown["average"], shown["averages_left_out"], shown["moments_left_out"]) == (True, 0, num_weights)
    assert main([*export, str(tmp_path / "weights")]) == 0
    assert json.loads(capsys.readouterr().out)["averages_left_out"] == num_weights
    for folder, prefix in (("average", "average/"), ("weights", "")):
        published = {
            name: array for path in (tmp_path / folder).glob("*.safetensors") for name, array in load_file(path).items()
        }
        np.testing.assert_array_equal(
            published["model.embed_tokens.weight"], last.read_box(f"{prefix}embedding.tokens")
        )
        np.testing.assert_array_equal(
            published["model.layers.1.mlp.up_proj.weight"], last.read_box(f"{prefix}layers.mlp.up")[1].T
        )


def test_a_checkpoint_with_an_average_is_written_for_another_layout(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "columns"
    reshard = [
        "ckpt",
        "reshard",
        str(trained / "run"),
        "--layout",
        "fsdp-tp",
        "--mesh",
        "fsdp=2,tensor=2",
        *OF_MODEL,
        "--json",
    ]
    assert main([*reshard, "--out", str(out)]) == 0
    ours, theirs = open_checkpoint(out / "checkpoints" / "step-00000004"), of_step(trained, 4)
    for name, info in ours.tensors.items():
        assert info.spec == ours.tensors[name.rpartition("/")[2]].spec
        np.testing.assert_array_equal(ours.read_box(name), theirs.read_box(name))
    # The boxes are those of the layout, and not one of the first device.
    assert len(ours.boxes("average/layers.mlp.up")) == len(ours.boxes("layers.mlp.up")) == 4


def test_a_plan_has_the_bytes_of_the_optimizer_and_of_the_average(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*arguments: str) -> dict[str, Any]:
        assert main(["plan", *MODEL, *FSDP, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    adamw, sgd = plan(), plan(*SGD, "--average", "0.6", "--moments-dtype", "bfloat16")
    weights = adamw["memory"]["weights_bytes"]
    assert "average" not in adamw
    assert "optimizer" not in adamw
    assert (sgd["optimizer"], sgd["average"]) == ("sgd momentum=0.9 nesterov=true", 0.6)
    # An average is float32, whatever the moments are.
    assert sgd["memory"]["optimizer_bytes"] == weights // 2
    assert sgd["memory"]["average_bytes"] == weights
    assert sgd["memory"]["saved_bytes"] == weights + weights // 2 + weights
    assert sgd["memory"]["total_bytes_per_device"] == adamw["memory"]["total_bytes_per_device"] - weights // 2
    assert main(["plan", *MODEL, *FSDP, *SGD, "--average", "0.6"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer    sgd momentum=0.9 nesterov=true; average of the weights 0.6" in shown
    assert re.search(rf"^ *average  +{weights:,} ", shown, re.MULTILINE)


def test_a_lock_keeps_the_optimizer_and_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lock", *MODEL, *FSDP, *SGD, "--average", "0.6", "--out", "a.lock.json"]) == 0
    request = json.loads(Path("a.lock.json").read_text())["request"]
    assert (request["optimizer"], request["optimizer_set"], request["average"]) == ("sgd", {"nesterov": "true"}, 0.6)
    assert main(["check", "a.lock.json"]) == 0
    assert main(["lock", *MODEL, *FSDP, "--out", "b.lock.json"]) == 0
    assert not {"optimizer", "optimizer_set", "average"} & json.loads(Path("b.lock.json").read_text())["request"].keys()
    capsys.readouterr()
    assert main(["diff", "a.lock.json", "b.lock.json", "--json"]) == 0
    assert "average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--average", "1"], "--average is 1, and must be above 0 and below 1, as 0.999."),
        (["--average", "nan"], "--average is nan, and must be above 0 and below 1, as 0.999."),
        (["--optimizer-set", "b1"], "--optimizer-set: 'b1' has no value."),
        (["--optimizer", "jax:lamb"], "--optimizer: 'jax:lamb' names 'jax'. Known: optax, torch."),
        (
            ["--optimizer", "torch:RAdam"],
            "--optimizer torch:RAdam is of torch, and --engine is jax. Give --engine torch.",
        ),
        (
            ["--optimizer", "optax:lamb", "--moments-dtype", "bfloat16"],
            "--optimizer optax:lamb computes in the dtype of what it is given, and --moments-dtype is bfloat16. Leave",
        ),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message_of(["plan", *MODEL, *arguments, "--json"], capsys).startswith(message)


def test_there_is_no_dry_run_of_an_optimizer_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compile", *MODEL, *TORCH, "--optimizer", "torch:RAdam", "--json"]
    assert message_of(asked, capsys) == (
        "--optimizer torch:RAdam: there is no dry run of it, because its step reads the number of steps. `plan` has its bytes. "
        "Give one that both engines have: adadelta, adagrad, adamax, adamw, lion, rmsprop, sgd."
    )


def test_an_export_without_an_average(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained.exists()
    folder = with_text(tmp_path)
    assert main(train(folder, *TORCH, "--optimizer", "torch:RAdam", "--checkpoint-every", "2")) == 0
    export = [
        "ckpt",
        "export",
        "huggingface",
        str(folder / "run"),
        "--out",
        str(folder / "to"),
        "--average",
        *OF_MODEL,
        "--json",
    ]
    assert message_of(export, capsys) == (
        f"--average: {folder}/run/checkpoints/step-00000004 has no average of the weights. Leave --average out, or train with "
        f"--average 0.999."
    )
    # An optimizer of PyTorch goes on there as if it had not stopped, and nowhere else.
    last = of_step(folder, 4)
    assert last.tensors["optimizer/step"].shape == ()
    assert float(last.read_box("optimizer/step")) == 4
    values = {name: last.read_box(name) for name in last.tensors}
    shutil.rmtree(last.directory)
    refused = message_of(train(folder, *FSDP, "--resume"), capsys)
    assert "  optimizer: was 'torch:RAdam', is 'adamw b1=0.9 b2=0.95 eps=1e-08'" in refused
    assert main(train(folder, *TORCH, "--optimizer", "torch:RAdam", "--resume")) == 0
    for name, array in values.items():
        np.testing.assert_array_equal(of_step(folder, 4).read_box(name), array, err_msg=name)


@pytest.mark.parametrize(
    "name", [rest(name) for name in (*OPTIMIZERS, "optax:lamb", "optax:contrib.schedule_free_adamw")]
)
def test_a_run_under_another_layout_is_the_same_run(name: str, tmp_path: Path) -> None:
    """Four steps on one device, and two of them on four."""
    folder = with_text(tmp_path)
    optimizer = ["--optimizer", name, "--average", "0.6"]
    assert (
        main(train(folder, "--layout", "fsdp", "--mesh", "fsdp=1", *optimizer, "--checkpoint-every", "2", lr="1e-3"))
        == 0
    )
    half, alone = (
        {one: of_step(folder, step).read_box(one).astype(np.float64) for one in of_step(folder, step).tensors}
        for step in (2, 4)
    )
    others = [["--layout", "fsdp-tp", "--mesh", "fsdp=2,tensor=2"], *([] if ":" in name else [TORCH])]
    for layout in others:
        assert main(train(folder, *layout, *optimizer, "--resume-from", "2", lr="1e-3")) == 0
        found = of_step(folder, 4)
        for one, array in alone.items():
            # Of all elements together: a formula with the sign of a gradient near 0 turns its last bit into a full step.
            moved = np.linalg.norm(array - half[one]) + 1e-12
            assert np.linalg.norm(found.read_box(one) - array) <= 2e-2 * moved, (layout, one)
