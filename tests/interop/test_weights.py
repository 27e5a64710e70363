"""Weights of Hugging Face in and out, against transformers: every tensor bit for bit, and the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoint import Checkpoint, latest, verify
from shardwright.checkpoint.reading import streams
from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights.exporting import WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.importing import WeightsImport, import_weights
from shardwright.models import build
from tests.checkpoint.reads import Counted
from tests.engine_jax.logits import our_logits
from tests.interop.published_folder import loaded_again, made_folder
from tests.models.published import LENGTH, ROWS, TOLERANCE

YARN = {"rope.original_length": "32"}
CASES = {
    "llama": ("llama3-test", {}, {}),
    "llama tied": ("llama3-test", {"tied": "true"}, {}),
    "llama in three files": ("llama3-test", {}, {"shard": "1500KB"}),
    "llama bfloat16": ("llama3-test", {}, {"dtype": torch.bfloat16}),
    "llama float16": ("llama3-test", {}, {"dtype": torch.float16}),
    "mixtral": ("mixtral-test", {}, {"shard": "3MB"}),
    "mixtral stacked": ("mixtral-test", {}, {"stacked": True, "shard": "3MB"}),
    "deepseek": ("deepseek3-test", YARN, {"shard": "4MB"}),
    "deepseek stacked": ("deepseek3-test", YARN, {"stacked": True}),
}


def opened(out: Path) -> Checkpoint:
    checkpoint = latest(out).checkpoint
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize(("name", "settings", "how"), CASES.values(), ids=CASES)
def test_in_and_out(name: str, settings: dict, how: dict, tmp_path: Path) -> None:
    made = made_folder(tmp_path / "folder", name, settings, **how)
    steps: list[tuple[int, int]] = []
    imported = import_weights(WeightsImport(folder=made.path, out=tmp_path / "out"), lambda *step: steps.append(step))
    assert steps[-1] == (imported.num_bytes, imported.num_bytes)
    assert verify(tmp_path / "out")["ok"]
    checkpoint = opened(tmp_path / "out")
    assert checkpoint.point.step == 0
    # The model by its name and settings is the one that the folder was made of.
    assert build(imported.model.name, imported.model.settings).weights == made.table.weights
    dtype = how.get("dtype", torch.float32)
    for weight in made.table.weights:
        needed = torch.from_numpy(made.weights[weight.name]).to(torch.float32 if weight.frozen else dtype)
        found = checkpoint.read_box(weight.name, raw=True)
        assert found.shape == tuple(needed.shape), weight.name
        assert found.tobytes() == needed.contiguous().view(torch.uint8).numpy().tobytes(), weight.name

    export = WeightsExport(directory=tmp_path / "out", to=tmp_path / "back", max_file_bytes=2_000_000)
    with patch.object(streams, "open_regular", Counted), patch.object(Counted, "total", 0):
        exported = export_weights(export)
        # Layers of a small tensor are in the same pieces.
        assert Counted.total == imported.num_bytes
    assert exported.num_files > 1
    assert (tmp_path / "back" / "config.json").read_bytes() == (made.path / "config.json").read_bytes()
    again = loaded_again(tmp_path / "back").state_dict()
    assert again.keys() == made.state.keys()
    for key, tensor in made.state.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize("case", ["llama", "llama tied", "mixtral", "mixtral stacked"])
def test_logits(case: str, tmp_path: Path) -> None:
    name, settings, how = CASES[case]
    made = made_folder(tmp_path / "folder", name, settings, **how)
    import_weights(WeightsImport(folder=made.path, out=tmp_path / "out"))
    checkpoint = opened(tmp_path / "out")
    weights = {weight.name: checkpoint.read_box(weight.name) for weight in made.table.weights}
    tokens = np.random.default_rng(1).integers(0, made.table.sizes["vocab"], (ROWS, LENGTH))
    with torch.no_grad():
        theirs = loaded_again(made.path)(torch.from_numpy(tokens)).logits.numpy()
    assert np.std(theirs) > 0.5
    np.testing.assert_allclose(our_logits(made.table, weights, {"tokens": tokens}), theirs, rtol=0, atol=TOLERANCE)


def test_a_dtype_on_the_way_in_and_out(tmp_path: Path) -> None:
    made = made_folder(tmp_path / "folder", "deepseek3-test", YARN, dtype=torch.bfloat16)
    import_weights(WeightsImport(folder=made.path, out=tmp_path / "out", dtype="float32"))
    assert {info.dtype for info in opened(tmp_path / "out").tensors.values()} == {"float32"}
    export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back", dtype="bfloat16"))
    again = loaded_again(tmp_path / "back").state_dict()
    for key, tensor in made.state.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key


def test_a_folder_of_one_file_is_exported_as_one(tmp_path: Path) -> None:
    made = made_folder(tmp_path / "folder", "llama3-test")
    import_weights(WeightsImport(folder=made.path, out=tmp_path / "out"))
    export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back"))
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names


def test_the_index_names_every_tensor_once(tmp_path: Path) -> None:
    made = made_folder(tmp_path / "folder", "mixtral-test", shard="3MB")
    import_weights(WeightsImport(folder=made.path, out=tmp_path / "out"))
    export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back", max_file_bytes=3_000_000))
    theirs, ours = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (made.path, tmp_path / "back")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert {(tmp_path / "back" / file).exists() for file in ours["weight_map"].values()} == {True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_frequencies_that_older_releases_saved_are_left_out_if_they_are_the_models(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As in the published folder of Llama 2. transformers has not read them for years."""
    made = made_folder(tmp_path / "folder", "llama3-test")
    rotary: Any = made.model.model.rotary_emb
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]
    path = made.path / "model.safetensors"
    tensors = load_file(path) | {name: rotary.inv_freq.to(dtype, copy=True) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    found = import_weights(WeightsImport(folder=made.path, out=tmp_path / "out"))
    assert [one.names for one in found.left_out] == [tuple(names)]
    tensors[names[1]] = tensors[names[1]] * 0.9
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"'{names[1]}' has other inverse frequencies than rope_theta 500,000"):
        import_weights(WeightsImport(folder=made.path, out=tmp_path / "other"))
