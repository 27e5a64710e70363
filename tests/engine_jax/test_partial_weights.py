"""`train --weights` with weights that are new, left out or cast: of checkpoints and model folders, on both engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from shardwright.checkpoint import Checkpoint, OwnedBox, RunPoint, TensorInfo, latest, save_checkpoint
from shardwright.cli.main import main
from shardwright.core.boxes.box import Box
from shardwright.init import box_values
from shardwright.models import build
from tests.engine_jax.commands import TEXT
from tests.interop.published_folder import Made, made_folder
from tests.matrix import rest
from tests.typed import once

SETTINGS = {"embed": "64", "mlp": "128", "num_layers": "1", "vocab": "320"}
STILL = ["--batch", "2", "--length", "16", "--data", TEXT, "--steps", "1", "--lr", "1e-30", "--seed", "7", "--json"]
"""So small a learning rate changes no weight by more than its last bits."""
ONE = ["--layout", "fsdp", "--mesh", "fsdp=1"]
TORCH = [*ONE, "--engine", "torch"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model folder, ``folder``, and beside it its checkpoint, ``start``."""
    path = tmp_path_factory.mktemp("made")
    found = made_folder(path / "folder", "llama3-test", SETTINGS)
    assert main(["ckpt", "import", "huggingface", str(path / "folder"), "--out", str(path / "start"), "--json"]) == 0
    return found


@pytest.fixture(autouse=True)
def _here(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "start"):
        Path(name).symlink_to(made.path.with_name(name))


def newest(out: str) -> Checkpoint:
    checkpoint = latest(out).checkpoint
    assert checkpoint is not None
    return checkpoint


def train(*arguments: str, **settings: str) -> int:
    given = [f"{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
    return main(once(["train", "llama3-test", "--set", *given, *STILL, "--out", "run", *arguments]))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return json.loads(capsys.readouterr().out)["run"]["said"]


def error(capsys: pytest.CaptureFixture[str]) -> str:
    return json.loads(capsys.readouterr().out)["error"]["message"]


def initial(name: str, **settings: str) -> np.ndarray:
    weight = build("llama3-test", {**SETTINGS, **settings}).weight(name)
    shape = (weight.num, *weight.shape) if weight.stack else weight.shape
    return box_values(weight, 7, Box.whole(shape))


@pytest.mark.parametrize(
    ("source", "engine"), [("start", ONE), ("start", TORCH), rest("folder", ONE), ("folder", TORCH)]
)
def test_a_new_vocabulary(source: str, engine: list[str], made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*engine, "--weights", source, "--weights-new", "embedding*", "logits*", vocab="352") == 0
    lines = said(capsys)
    assert "2 tensors are from the initial values of seed 7: 'embedding.tokens' and 'logits.kernel'" in lines
    if source == "start":
        assert (
            "2 tensors are left out of start/checkpoints/step-00000000: 'embedding.tokens' and 'logits.kernel'" in lines
        )
    else:
        assert "left out: 2 tensors as 'model.embed_tokens.weight': new by --weights-new" in lines
    run = newest("run")
    for name in run.tensors:
        if name.startswith(("embedding", "logits")):
            np.testing.assert_array_equal(run.read_box(name), initial(name, vocab="352"))
        elif name in made.weights:
            np.testing.assert_array_equal(run.read_box(name), made.weights[name], err_msg=name)
    # The configuration that came with the weights is not that of this model, so an export does not write it.
    assert run.point.metadata.get("hugging_face", {}).get("config") is None


def test_tensors_that_the_model_lacks(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder and of a checkpoint: refused with their names, and left out on request."""
    shutil.copytree(made.path, "more")
    tensors = load_file("more/model.safetensors")
    save_file({**tensors, "score.weight": tensors["model.norm.weight"].clone()}, "more/model.safetensors")
    assert train(*TORCH, "--weights", "more") == 2
    assert error(capsys) == (
        "--weights: more: its tensors are not those of llama3-test, and nothing was written:\n"
        "  'score.weight': extra, F32 (64,), not in the model\n"
        "On request: --weights-skip PATTERN leaves tensors out."
    )
    assert train(*TORCH, "--weights", "more", "--weights-skip", "score*") == 0
    assert "left out: 1 tensors as 'score.weight': by --weights-skip" in said(capsys)
    copy = newest("start")
    extra = [TensorInfo(name="score.kernel", shape=(3,), dtype="float32")]
    boxes = [
        OwnedBox(name=name, box=box, array=copy.read_box(name, box))
        for name in copy.tensors
        for box in copy.boxes(name)
    ]
    boxes.append(OwnedBox(name="score.kernel", box=Box((0,), (3,)), array=np.ones(3, np.float32)))
    save_checkpoint("scored", copy.point, [*copy.tensors.values(), *extra], boxes)
    shutil.rmtree("run")
    assert train(*TORCH, "--weights", "scored") == 2
    assert error(capsys) == (
        "--weights scored/checkpoints/step-00000000: its tensors are not those of this run:\n"
        "  'score.kernel': extra, float32 (3,), which this run does not have\n"
        "On request: --weights-skip PATTERN leaves tensors out."
    )
    assert train(*TORCH, "--weights", "scored", "--weights-skip", "score.*") == 0
    assert "1 tensor is left out of scored/checkpoints/step-00000000: 'score.kernel'" in said(capsys)


def test_a_missing_tensor_is_named_with_the_option(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made.path, "less")
    tensors = load_file("less/model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, "less/model.safetensors")
    assert train(*TORCH, "--weights", "less") == 2
    assert error(capsys) == (
        "--weights: less: its tensors are not those of llama3-test, and nothing was written:\n"
        "  'lm_head.weight': missing\n"
        "On request: --weights-new logits.kernel begins from initial values."
    )
    assert train(*TORCH, "--weights", "less", "--weights-new", "logits.kernel") == 0
    np.testing.assert_array_equal(newest("run").read_box("logits.kernel"), initial("logits.kernel"))


@pytest.mark.parametrize("source", ["start", "folder"])
def test_another_vocabulary_and_tied_embeddings_are_offered(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    offer = "On request: --weights-new PATTERN begins tensors from initial values; --weights-skip PATTERN leaves tensors out."
    assert train(*TORCH, "--weights", source, vocab="352") == 2
    message = error(capsys)
    assert "\n  vocab: 320, not 352\n" in message
    assert message.endswith(offer)
    # Every tensor that it concerns must be named.
    assert train(*TORCH, "--weights", source, "--weights-new", "logits.kernel", vocab="352") == 2
    assert "shape: found (320, 64), needed (352, 64)\nOn request: --weights-new " in error(capsys)
    assert train(*TORCH, "--weights", source, tied="true") == 2
    message = error(capsys)
    assert "\n  tied: False, not True\n" in message
    assert message.endswith(offer)
    skipped = "lm_head.*" if source == "folder" else "logits.*"
    assert train(*TORCH, "--weights", source, "--weights-skip", skipped, tied="true") == 0
    assert "logits.kernel" not in newest("run").tensors


@pytest.mark.parametrize("engine", [ONE, TORCH], ids=["jax", "torch"])
def test_a_cast(engine: list[str], made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    bfloat16 = ["--weights-dtype", "bfloat16", "--weights", "start"]
    assert train(*engine, *bfloat16) == 2
    assert error(capsys).endswith(
        "Give --weights-dtype float32, import the weights again with --dtype bfloat16, or cast them with --weights-cast."
    )
    assert train(*engine, *bfloat16, "--weights-cast", "--weights-new", "logits.kernel") == 0
    (line,) = [line for line in said(capsys) if " cast from " in line]
    assert line.startswith(f"{len(made.weights) - 1} tensors are cast from float32 to bfloat16: 'embedding.tokens', ")
    run = newest("run")
    for name, array in made.weights.items():
        needed = initial(name) if name == "logits.kernel" else array
        np.testing.assert_array_equal(run.read_box(name), needed.astype(ml_dtypes.bfloat16), err_msg=name)


def test_what_is_not_a_float_is_not_cast(capsys: pytest.CaptureFixture[str]) -> None:
    point = RunPoint(step=1, seed=0, data_position=0, model="m", layout_name="none", layout_text="", mesh={})
    names = build("llama3-test", SETTINGS).weights
    infos = [
        TensorInfo(name=one.name, shape=(one.num, *one.shape) if one.stack else one.shape, dtype="int32")
        for one in names
    ]
    boxes = [OwnedBox(name=one.name, box=Box.whole(one.shape), array=np.zeros(one.shape, np.int32)) for one in infos]
    save_checkpoint("odd", point, infos, boxes)
    assert train(*TORCH, "--weights", "odd", "--weights-cast") == 2
    first = error(capsys).splitlines()
    assert first[:2] == [
        "--weights odd/checkpoints/step-00000001: its tensors are not those of this run:",
        "  'embedding.tokens': dtype: found int32, needed float32",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "start", "--weights-new", "logits.kernal"], "--weights-new: the pattern 'logits.kernal' matches no name. Did you mean 'logits.kernel'?"),
        (["--weights", "start", "--weights-skip", "head"], "--weights-skip: the pattern 'head' matches no name."),
        (["--weights", "folder", "--weights-skip", "lm_haed*"], "--weights: --weights-skip: the pattern 'lm_haed*' matches no name. Did you mean 'lm_head.weight'?"),
        (["--weights", "start", "--weights-skip", "logits*"], "--weights-skip: the model has 'logits.kernel' too. Name the tensor with --weights-new, so that it begins from initial values, or leave it out."),
        (["--weights", "folder", "--weights-skip", "lm_head*"], "--weights: --weights-skip: the model has 'lm_head.weight' too. Give --weights-new logits.kernel, so that they begin from initial values, or leave it out."),
        (["--weights-new", "logits*"], "--weights-new is for --weights. Give both, or neither."),
        (["--weights", "start", "--weights-new", "logits*", "--set", "rope.theta=1e4"], "  rope.theta: 500000.0, not 10000.0"),
    ],
)  # fmt: skip
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*TORCH, *arguments) == 2
    assert message in error(capsys)
    assert not Path("run").exists()
