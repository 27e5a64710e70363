"""Folders in FP8 with scales, imported: the values are those of torch, and what is wrong with a scale is named."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoint import latest
from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights import elements
from shardwright.interop.hugging_face.weights.exporting import WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.files.quantized import VALUES
from shardwright.interop.hugging_face.weights.importing import WeightsImport, import_weights
from tests.interop.fp8_folder import quantize_folder
from tests.interop.published_folder import loaded_again, made_folder
from tests.models.to_published import to_published

DEEPSEEK = {"rope.original_length": "32", "num_experts": "8", "num_layers": "2"}
NORM = "model.norm.weight"
MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A DeepSeek in three files, whose last blocks are not full: 80 of 128 rows, and 32 of 128 columns."""
    folder = tmp_path_factory.mktemp("fp8") / "folder"
    made_folder(folder, "deepseek3-test", DEEPSEEK, shard="700KB", dtype=torch.bfloat16)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder, quantize_folder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in one file, with blocks of 96 x 100."""
    settings = {"num_layers": "2", "embed": "128", "mlp": "160"}
    found = made_folder(tmp_path / "folder", "llama3-test", settings).path
    quantize_folder(found, (96, 100))
    return found


def test_every_element_has_its_value() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    needed = bits.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(VALUES, needed, equal_nan=True)
    assert np.array_equal(np.signbit(VALUES), np.signbit(needed))


@pytest.mark.parametrize("chunk", [elements.CHUNK_ELEMENTS, 1000])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_values_are_those_of_torch(
    dtype: str | None,
    chunk: int,
    made: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, values = made
    monkeypatch.setattr(elements, "CHUNK_ELEMENTS", chunk)
    imported = import_weights(WeightsImport(folder=folder, out=tmp_path / "out", dtype=dtype))
    num = sum(name.endswith("_proj.weight") or "with_mqa" in name for name in values)
    assert (imported.num_dequantized, imported.block) == (num, (128, 128))
    checkpoint = latest(tmp_path / "out").checkpoint
    assert checkpoint is not None
    compared = 0
    for weight in imported.model.table.weights:
        found = checkpoint.read_box(weight.name, raw=True)
        found = found.view(ml_dtypes.bfloat16 if found.itemsize == 2 else np.float32)
        for name, array in to_published(weight, found):
            needed = values[name]
            if not weight.frozen:
                needed = needed.to(torch.bfloat16 if dtype is None else torch.float32)
            assert np.array_equal(array.astype(np.float32), needed.float().numpy()), name
            compared += 1
    assert compared == len(values)


def test_exported_without_what_says_that_it_is_fp8(made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, values = made
    import_weights(WeightsImport(folder=folder, out=tmp_path / "out", dtype="float32"))
    exported = export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back"))
    assert exported.config_changes == ("without 'quantization_config'", "'dtype' float32")
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "back"))
    assert after == {**{key: before[key] for key in before if key != "quantization_config"}, "dtype": "float32"}
    again = loaded_again(tmp_path / "back")
    assert again.dtype == torch.float32
    key = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(again.state_dict()[key], values[key])


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    settings = {
        "num_layers": "2",
        "embed": "1024",
        "num_heads": "1",
        "num_kv_heads": "1",
        "head_dim": "64",
        "mlp": "4096",
    }
    folder = made_folder(tmp_path / "folder", "llama3-test", settings, dtype=torch.bfloat16).path
    quantize_folder(folder)
    largest = 1024 * 4096 * 2
    tracemalloc.start()

    def after_the_first(done: int, _: int) -> None:
        # Reading text reserves more than this, and uses it not.
        if done < largest:
            tracemalloc.reset_peak()

    import_weights(WeightsImport(folder=folder, out=tmp_path / "out"), after_the_first)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The tensor, its transpose, and a chunk of elements in float32 with what its cast needs.
    assert 2 * largest < peak < 2 * largest + 16 * elements.CHUNK_ELEMENTS


def refused(folder: Path, **options: object) -> list[str]:
    with pytest.raises(InputError) as error:
        import_weights(WeightsImport(folder=folder, out=folder.parent / "out", **options))  # pyright: ignore
    assert not (folder.parent / "out").exists()
    return str(error.value).replace(str(folder), "FOLDER").splitlines()


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
LINES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda tensors: tensors.pop(f"{UP}_scale_inv"),
        f"'{UP}_scale_inv': missing: the scales of '{UP}', which is FP8",
    ),
    "extra": (
        lambda tensors: tensors.update({f"{NORM}_scale_inv": torch.ones(2, 2)}),
        f"'{NORM}_scale_inv': extra: scales of '{NORM}', which is F32 and needs none",
    ),
    "of no tensor": (
        lambda tensors: tensors.update({"x_scale_inv": torch.ones(2, 2)}),
        "'x_scale_inv': extra: scales of 'x', which is missing",
    ),
    "shape": (
        lambda tensors: tensors.update({f"{UP}_scale_inv": torch.ones(2, 1)}),
        f"'{UP}_scale_inv': shape: found (2, 1), needed (2, 2): one for each block of 96 x 100 of (160, 128)",
    ),
    "dtype": (
        lambda tensors: tensors.update({f"{UP}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
        f"'{UP}_scale_inv': dtype: found I32, needed one of float32, bfloat16, float16",
    ),
    "a vector": (
        lambda tensors: tensors.update({NORM: torch.ones(128).to(torch.float8_e4m3fn)}),
        f"'{NORM}': shape: found (128,) in FP8, needed a matrix",
    ),
    "another FP8": (
        lambda tensors: tensors.update({UP: torch.ones(160, 128).to(torch.float8_e5m2)}),
        f"'{UP}': dtype: found F8_E5M2, needed one of float32, bfloat16, float16",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_a_scale_that_is_wrong(case: str, folder: Path) -> None:
    change, line = LINES[case]
    edit(folder, change)
    first, *lines = refused(folder)
    assert first == "FOLDER: its tensors are not those of its config.json, and nothing was written:"
    assert f"  {line}" in lines


def test_without_any_scale(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("_scale_inv")])
    _, *lines = refused(folder)
    assert len(lines) == 14
    assert f"  '{UP}_scale_inv': missing: the scales of '{UP}', which is FP8" in lines


@pytest.mark.parametrize(
    ("given", "message"),
    {
        "none": (None, "'quantization_config' is nothing, and the folder has scales of FP8"),
        "a list": ([], "'quantization_config' is "),
        "another method": ({"quant_method": "gptq"}, "Only fp8 in e4m3 is read: convert the folder to bfloat16 first."),
        "no block": ({"quant_method": "fp8"}, "'quantization_config' has weight_block_size nothing, and two whole"),
        "a bad block": ({"weight_block_size": [128, 0]}, "and two whole numbers above 0 are needed, as [128, 128]."),
    }.values(),
)
def test_a_configuration_that_does_not_say_what_has_one_scale(given: object, message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
    assert message in "\n".join(refused(folder))


def test_no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refused(folder, model="llama3-test") == [
        "FOLDER: its weights are FP8, and there is no config.json, which says what has one scale. Add it."
    ]
