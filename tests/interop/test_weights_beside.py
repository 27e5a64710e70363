"""What stands beside the weights of a folder: the tokenizer, and layers that predict further tokens. Nothing is lost silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoint import latest, saving
from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights import importing
from shardwright.interop.hugging_face.weights.beside import num_ids
from shardwright.interop.hugging_face.weights.exporting import Exported, WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.importing import Imported, WeightsImport, import_weights
from tests.interop.fp8_folder import quantize_folder
from tests.interop.published_folder import made_folder
from tests.interop.tokenizer_beside import add_tokenizer

SETTINGS = {"num_layers": "2", "num_experts": "8", "rope.original_length": "32"}
MODEL = "model.safetensors"
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
PREDICTION = {
    "model.layers.2.eh_proj.weight": ((128, 256), torch.bfloat16),
    "model.layers.2.enorm.weight": ((128,), torch.bfloat16),
    "model.layers.2.mlp.experts.0.up_proj.weight": ((128, 128), torch.bfloat16),
    "model.layers.2.mlp.gate.e_score_correction_bias": ((8,), torch.float32),
    "model.layers.2.shared_head.head.weight": ((256, 128), torch.bfloat16),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek with a prediction layer and a tokenizer."""
    path = tmp_path_factory.mktemp("beside") / "folder"
    made_folder(path, "deepseek3-test", SETTINGS, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    further = {name: torch.randn(shape, generator=draw).to(dtype) for name, (shape, dtype) in PREDICTION.items()}
    save_file({**load_file(path / MODEL), **further}, path / MODEL, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    add_tokenizer(path)
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "folder"))


def imported(folder: Path, **options: object) -> Imported:
    return import_weights(WeightsImport(folder=folder, out=folder.parent / "out", **options))  # pyright: ignore


def exported(folder: Path, **options: object) -> Exported:
    to = folder.parent / "back"
    return export_weights(WeightsExport(directory=folder.parent / "out", to=to, **options))  # pyright: ignore


def assert_same(found: dict[str, torch.Tensor], needed: dict[str, torch.Tensor]) -> None:
    assert found.keys() == needed.keys()
    for name, tensor in needed.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_kept_and_written_again_bit_for_bit(folder: Path) -> None:
    found = imported(folder, keeps_prediction=True, dtype="float32")
    assert set(found.kept) == set(PREDICTION)
    assert (found.left_out, found.files) == ((), FILES)
    checkpoint = latest(folder.parent / "out").checkpoint
    assert checkpoint is not None
    assert {f"published.{name}" for name in PREDICTION} < checkpoint.tensors.keys()
    back = exported(folder, dtype="bfloat16")
    assert set(back.kept) == set(PREDICTION)
    assert back.missing_prediction == 0
    assert_same(load_file(folder.parent / "back" / MODEL), load_file(folder / MODEL))


def test_in_fp8_they_are_dequantised_as_the_others(folder: Path) -> None:
    values = quantize_folder(folder)
    found = imported(folder, keeps_prediction=True)
    assert found.num_dequantized == sum("_scale_inv" in name for name in load_file(folder / MODEL))
    exported(folder)
    needed = {name: value if name.endswith("_bias") else value.to(torch.bfloat16) for name, value in values.items()}
    assert_same(load_file(folder.parent / "back" / MODEL), needed)


def test_left_out_is_said_in_both_directions(folder: Path) -> None:
    (left_out,) = imported(folder).left_out
    assert set(left_out.names) == set(PREDICTION)
    back = exported(folder)
    assert (back.kept, back.missing_prediction) == ((), 1)
    assert set(load_file(folder.parent / "back" / MODEL)) == set(load_file(folder / MODEL)) - set(PREDICTION)


def test_those_of_another_checkpoint_are_written(folder: Path) -> None:
    imported(folder)
    other = folder.parent / "other"
    import_weights(WeightsImport(folder=folder, out=other, keeps_prediction=True))
    with pytest.raises(InputError) as error:
        exported(folder, prediction_layers=folder.parent / "out")
    assert str(error.value) == (
        f"--prediction-layers {folder.parent / 'out'}: no layers for multi-token prediction are kept there. Import them "
        f"with --keep-prediction-layers."
    )
    assert set(exported(folder, prediction_layers=other).kept) == set(PREDICTION)
    assert_same(load_file(folder.parent / "back" / MODEL), load_file(folder / MODEL))


def test_those_of_another_model_are_not(folder: Path) -> None:
    imported(folder, keeps_prediction=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "routed_scaling_factor": 3.0}))
    import_weights(WeightsImport(folder=folder, out=folder.parent / "other"))
    to = folder.parent / "back"
    with pytest.raises(InputError) as error:
        export_weights(WeightsExport(directory=folder.parent / "other", to=to, prediction_layers=folder.parent / "out"))
    first, line = str(error.value).splitlines()
    assert "these are layers of another model than" in first
    assert line == "  experts.scale: 2.5, not 3.0"
    assert not to.exists()


def test_there_must_be_some_to_keep(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(InputError) as error:
        imported(folder, keeps_prediction=True)
    assert str(error.value) == (
        f"{folder}: there are no layers for multi-token prediction to keep: num_nextn_predict_layers layers after layer 1 are "
        f"needed. Leave out --keep-prediction-layers."
    )


def test_the_tokenizer_goes_both_ways(folder: Path) -> None:
    assert imported(folder).files == FILES
    assert exported(folder).files == FILES
    for name in FILES:
        assert (folder.parent / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_a_tokenizer_that_is_none_or_too_large(folder: Path) -> None:
    out = folder.parent / "out"
    path = folder / "tokenizer.json"
    add_tokenizer(folder, ("[UNK]", *map(str, range(256)), "</s>"))
    with pytest.raises(InputError) as error:
        imported(folder)
    assert str(error.value) == (
        f"{path}: it has ids up to 257, and the model's vocabulary is 256. Replace it by the model's own tokenizer, or move "
        f"it away."
    )
    path.write_text('{"model": {}}')
    with pytest.raises(InputError, match=r"not a tokenizer\.json: 'model' has no 'vocab'"):
        imported(folder)
    assert not out.exists()


@pytest.mark.parametrize("target", ["gone", "/dev/zero"])
def test_a_tokenizer_that_is_no_file(target: str, folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(InputError) as error:
        imported(folder)
    assert str(error.value) == f"{path}: not a regular file. Fetch it again, or move it away."


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ('{"model": {"vocab": {"a": 3, "b": 7}}, "added_tokens": [{"id": 9}]}', 10),
        ('{"model": {"vocab": [["a", -1.5], ["b", -2.5]]}, "added_tokens": []}', 2),
        ('{"model": {"vocab": {}}}', 0),
    ],
)
def test_ids_of_a_tokenizer(text: str, num: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert num_ids(tmp_path / "tokenizer.json") == num


def test_an_import_that_fails_leaves_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder.parent / "out"

    def full(*_: object) -> None:
        assert (out / "published" / "tokenizer.json").exists()
        raise InputError("no space")

    monkeypatch.setattr(importing, "commit", full)
    with pytest.raises(InputError, match="no space"):
        imported(folder)
    assert not out.exists()


def test_files_of_other_weights_are_replaced_once_the_weights_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an import that was killed, or one that another user has under way."""
    published = folder.parent / "out" / "published"
    published.mkdir(parents=True)
    theirs = {"tokenizer.json": "theirs", "vocab.json": "theirs", "notes.txt": "mine"}
    for name, text in theirs.items():
        (published / name).write_text(text)
    with saving(folder.parent / "out", 0), pytest.raises(InputError, match="is saving a checkpoint here"):
        imported(folder)
    with monkeypatch.context() as failing:
        failing.setattr(importing, "commit", lambda *_: (_ for _ in ()).throw(InputError("no space")))
        with pytest.raises(InputError, match="no space"):
            imported(folder)
    assert {path.name: path.read_text() for path in published.iterdir()} == theirs
    imported(folder)
    assert {path.name for path in published.iterdir()} == {*FILES, "notes.txt"}
    assert (published / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_what_is_beside_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["ckpt", "import", "huggingface", "folder", "--out", "out", "--keep-prediction-layers"]) == 0
    printed = capsys.readouterr().out
    first = "'model.layers.2.mlp.gate.e_score_correction_bias'"
    kept = f"5 tensors as {first}, for multi-token prediction\n"
    assert kept in printed
    assert f"{', '.join(FILES)}\n" in printed
    assert main(["ckpt", "export", "huggingface", "out", "--out", "back"]) == 0
    assert kept in capsys.readouterr().out
    assert main(["ckpt", "import", "huggingface", "folder", "--out", "other"]) == 0
    assert f"left out  5 tensors as {first}: layers for" in capsys.readouterr().out
    assert main(["ckpt", "export", "huggingface", "other", "--out", "without"]) == 0
    assert "1 layer for multi-token prediction: the checkpoint does not hold them" in capsys.readouterr().out
    assert main(["ckpt", "export", "huggingface", "other", "--out", "with", "--prediction-layers", "out"]) == 0
    assert kept in capsys.readouterr().out
