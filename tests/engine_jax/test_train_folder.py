"""`train --weights FOLDER`: a run begins with a model folder itself, and uses the tokenizer beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoint import Checkpoint, latest
from shardwright.cli.main import main
from tests.engine_jax.commands import TEXT
from tests.interop.fp8_folder import quantize_folder
from tests.interop.published_folder import made_folder
from tests.interop.tokenizer_beside import WORDS, add_tokenizer
from tests.matrix import rest
from tests.typed import once

LLAMA = {"embed": "64", "mlp": "128", "num_layers": "2", "vocab": "320"}
DEEPSEEK = {"num_layers": "2", "num_experts": "8", "vocab": "320", "rope.original_length": "32"}
STILL = ["--batch", "4", "--length", "32", "--data", TEXT, "--steps", "1", "--lr", "1e-30", "--json"]
"""So small a learning rate changes no weight by more than its last bits."""

FILES = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
ONE = ["--layout", "fsdp", "--mesh", "fsdp=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in bfloat16: a Llama with a tokenizer, and a DeepSeek in FP8 with a prediction layer."""
    path = tmp_path_factory.mktemp("folders")
    made_folder(path / "llama", "llama3-test", LLAMA, dtype=torch.bfloat16, shard="100KB")
    add_tokenizer(path / "llama")
    made_folder(path / "deepseek", "deepseek3-test", DEEPSEEK, dtype=torch.bfloat16)
    quantize_folder(path / "deepseek")
    model = path / "deepseek" / "model.safetensors"
    save_file({**load_file(model), "model.layers.2.enorm.weight": torch.ones(4)}, model)
    config = json.loads((path / "deepseek" / "config.json").read_text())
    (path / "deepseek" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return path


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def newest(out: str) -> Checkpoint:
    checkpoint = latest(out).checkpoint
    assert checkpoint is not None
    return checkpoint


def train(family: str, *arguments: str) -> int:
    settings = [f"{name}={value}" for name, value in (LLAMA if family == "llama3" else DEEPSEEK).items()]
    return main(once(["train", f"{family}-test", "--set", *settings, *STILL, *arguments]))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return json.loads(capsys.readouterr().out)["run"]["said"]


@pytest.mark.parametrize(
    "layout",
    [
        ["--layout", "fsdp", "--mesh", "fsdp=4"],
        ["--layout", "tp", "--mesh", "data=1,tensor=2"],
        [*ONE, "--engine", "torch"],
    ],
)
def test_a_folder_is_read_as_its_checkpoint(
    layout: list[str], folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("llama3", *layout, "--weights", str(folders / "llama"), "--out", "run") == 0
    lines = said(capsys)
    assert "weights are cast from bfloat16 to float32" in lines
    assert f"weights from {folders / 'llama'} (step 0 of llama3-test)" in lines
    assert main(["ckpt", "import", "huggingface", str(folders / "llama"), "--out", "start", "--dtype", "float32"]) == 0
    for name in newest("start").tensors:
        assert np.array_equal(newest("run").read_box(name), newest("start").read_box(name)), name
    # The folder is as it was, and no checkpoint was made of it.
    assert not (folders / "llama" / "checkpoints").exists()


def test_fp8_experts_and_what_is_left_out(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "ep", "--mesh", "data=1,fsdp=2,expert=2", "--weights-dtype", "bfloat16"]
    assert train("deepseek3", *layout, "--weights", str(folders / "deepseek"), "--out", "run") == 0
    lines = said(capsys)
    assert any("tensors of FP8 are dequantised by their scales" in line for line in lines)
    assert any(line.startswith("left out: 1 tensors as 'model.layers.2.enorm.weight'") for line in lines)
    assert main(["ckpt", "import", "huggingface", str(folders / "deepseek"), "--out", "start"]) == 0
    for name in newest("start").tensors:
        found, needed = (newest(out).read_box(name).astype(np.float32) for out in ("run", "start"))
        # A step moves a zero, of which FP8 has some, and the routing bias by a rate of its own.
        np.testing.assert_allclose(found, needed, rtol=0, atol=1.001e-3 if "bias" in name else 1e-29)


@pytest.mark.parametrize("engine", [rest("jax"), "torch"])
def test_layers_that_are_kept_beside_are_not_read(engine: str, folders: Path) -> None:
    folder = str(folders / "deepseek")
    keep = ["--dtype", "float32", "--keep-prediction-layers"]
    assert main(["ckpt", "import", "huggingface", folder, "--out", "start", *keep]) == 0
    assert train("deepseek3", *ONE, "--engine", engine, "--weights", "start", "--out", "run") == 0
    assert "published.model.layers.2.enorm.weight" in newest("start").tensors
    assert not any(name.startswith("published.") for name in newest("run").tensors)


def test_the_tokenizer_of_the_weights_is_used_and_goes_on_with_the_run(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "import", "huggingface", str(folders / "llama"), "--out", "start", "--dtype", "float32"]) == 0
    capsys.readouterr()
    steps = ["--steps", "2"]
    assert train("llama3", *ONE, "--weights", "start", "--out", "run", *steps, "--stop-after", "1") == 0
    lines = said(capsys)
    assert any("(tokenizer: start/published/tokenizer.json)" in line for line in lines)
    assert (
        f"copied to run/published: {', '.join(['tokenizer.json', 'tokenizer_config.json', 'generation_config.json'])}"
        in lines
    )
    shutil.rmtree("start")
    assert train("llama3", *ONE, "--resume", "--out", "run", *steps) == 0
    assert any("(tokenizer: run/published/tokenizer.json)" in line for line in said(capsys))
    # An export of the run finds the configuration and the files without another option.
    assert main(["ckpt", "export", "huggingface", "run", "--out", "back", "--json"]) == 0
    assert {path.name for path in Path("back").iterdir()} > FILES
    assert json.loads(Path("back/config.json").read_text())["dtype"] == "float32"


def test_a_run_with_another_tokenizer_does_not_pass_on_that_of_the_weights(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other").mkdir()
    add_tokenizer(Path("other"), WORDS[::-1])
    tokenizer = ["--tokenizer", "other/tokenizer.json"]
    assert train("llama3", *ONE, "--weights", str(folders / "llama"), "--out", "run", *tokenizer) == 0
    lines = said(capsys)
    assert any("(tokenizer: other/tokenizer.json)" in line for line in lines)
    assert "copied to run/published: generation_config.json" in lines
    assert {path.name for path in Path("run/published").iterdir()} == {"generation_config.json", "tokenizer.json"}
    assert Path("run/published/tokenizer.json").read_bytes() == Path("other/tokenizer.json").read_bytes()


def test_a_tokenizer_that_does_not_fit(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folders / "llama", "folder")
    add_tokenizer(Path("folder"), ("[UNK]", *map(str, range(400)), "</s>"))
    assert train("llama3", *ONE, "--weights", "folder", "--out", "run") == 2
    assert "tokenizer folder/tokenizer.json has ids up to 401" in capsys.readouterr().out
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "another model": ({"rope_theta": 1e4, "rope_parameters": None}, "rope.theta: 10000.0, not 500000.0"),
        "another shape": ({"intermediate_size": 96}, "mlp: 96, not 128"),
    }.values(),
)
def test_another_model(
    change: dict[str, object], message: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "llama", "folder")
    config = json.loads(Path("folder/config.json").read_text())
    Path("folder/config.json").write_text(json.dumps({**config, **change}))
    assert train("llama3", *ONE, "--weights", "folder", "--out", "run") == 2
    error = json.loads(capsys.readouterr().out)["error"]["message"]
    assert error.startswith("--weights: folder/config.json and llama3-test are not the same model")
    assert message in error
    assert not Path("run").exists()


def test_a_folder_without_a_configuration_is_compared_by_its_tensors(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "llama", "folder")
    Path("folder/config.json").unlink()
    index = json.loads(Path("folder/model.safetensors.index.json").read_text())
    first = min(index["weight_map"], key=index["weight_map"].__getitem__)
    file = Path("folder", index["weight_map"].pop(first))
    Path("folder/model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors[first]
    save_file(tensors, file)
    assert train("llama3", *ONE, "--weights", "folder", "--out", "run") == 2
    error = json.loads(capsys.readouterr().out)["error"]["message"]
    assert error.startswith("--weights: folder: its tensors are not those of llama3-test, and nothing was written:")
    assert f"'{first}': missing" in error


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_where_there_is_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert train("llama3", *ONE, "--weights", name, "--out", "run") == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == (
        f"--weights: {name}: there is no checkpoint here. Give the --out of a run, or the directory of one step, as in "
        f"OUT/checkpoints/step-00000010. Or give a model folder, with config.json and safetensors files."
    )


def test_a_folder_is_not_written_into(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folders / "llama", "folder")
    Path("link").symlink_to("folder")
    before = sorted(Path("folder").iterdir())
    assert train("llama3", *ONE, "--weights", "folder", "--out", "link") == 2
    error = json.loads(capsys.readouterr().out)["error"]["message"]
    assert error == "--weights folder: the run would write into this folder. Give another --out."
    assert sorted(Path("folder").iterdir()) == before


@pytest.mark.parametrize("more", [(), ("--resume",), ("--resume-from", "0"), ("--weights", "start")])
def test_imported_weights_are_no_run(more: tuple[str, ...], folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "import", "huggingface", str(folders / "llama"), "--out", "start", "--dtype", "float32"]) == 0
    capsys.readouterr()
    assert train("llama3", *ONE, "--out", "start", *more) == 2
    error = json.loads(capsys.readouterr().out)["error"]["message"]
    if "--resume-from" not in more:
        assert error == (
            "start/checkpoints/step-00000000 is imported weights, and no run to go on with. Begin one with --weights start, "
            "and give another --out."
        )
