"""Folders written in FP8: what was imported and no run has changed has the same bytes, and anything else those of ml_dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights.exporting import Exported, WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.fp8 import written_as_fp8
from shardwright.interop.hugging_face.weights.importing import WeightsImport, import_weights
from tests.interop.fp8_folder import MATRIX, expanded, quantize_folder
from tests.interop.published_folder import made_folder

SETTINGS = {"rope.original_length": "32", "num_experts": "8", "num_layers": "2"}
MODEL = "model.safetensors"
LARGEST = 448.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek in FP8 with any scales, whose last blocks are not full."""
    path = tmp_path_factory.mktemp("fp8") / "folder"
    made_folder(path, "deepseek3-test", SETTINGS, dtype=torch.bfloat16)
    quantize_folder(path)
    return path


def exported(directory: Path, to: Path, **options: object) -> tuple[Exported, dict[str, torch.Tensor]]:
    found = export_weights(WeightsExport(directory=directory, to=to, fp8=True, **options))  # pyright: ignore
    return found, load_file(to / MODEL)


def assert_same_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


def by_ml_dtypes(matrix: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of codes, and the scales: the least powers of two by which a block fits."""
    rows, columns = (-(-size // of) for size, of in zip(matrix.shape, block, strict=True))
    scales = np.ones((rows, columns), np.float32)
    codes = np.zeros(matrix.shape, np.uint8)
    for row in range(rows):
        for column in range(columns):
            at = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            values = matrix[at].astype(np.float64)
            if amax := np.abs(values).max():
                scales[row, column] = 2.0 ** np.ceil(np.log2(amax / LARGEST))
            narrow = (values / scales[row, column]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            codes[at] = narrow.view(np.uint8)
    return codes, scales


def test_what_was_imported_is_exported_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    imported = import_weights(WeightsImport(folder=folder, out=tmp_path / "out", keeps_fp8=True))
    published = load_file(folder / MODEL)
    num = sum(MATRIX.search(name) is not None and not name.endswith("_inv") for name in published)
    assert imported.kept_fp8 == num
    written, found = exported(tmp_path / "out", tmp_path / "back")
    assert (written.fp8_kept, written.fp8_quantized, written.fp8_block) == (num, 0, (128, 128))
    assert_same_bytes(found, published)
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_codes_that_were_kept_are_left_out_of_other_exports(folder: Path, tmp_path: Path) -> None:
    import_weights(WeightsImport(folder=folder, out=tmp_path / "out", keeps_fp8=True))
    export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back"))
    found = load_file(tmp_path / "back" / MODEL)
    assert not any(name.endswith("_scale_inv") for name in found)
    assert all(tensor.dtype != torch.float8_e4m3fn for tensor in found.values())


def test_other_values_are_quantized_as_by_ml_dtypes(tmp_path: Path) -> None:
    settings = {"num_layers": "1", "embed": "160", "mlp": "288", "num_heads": "2", "num_kv_heads": "2"}
    path = made_folder(tmp_path / "folder", "llama3-test", settings).path
    import_weights(WeightsImport(folder=path, out=tmp_path / "out"))
    written, found = exported(tmp_path / "out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    values = load_file(path / MODEL)
    assert (written.fp8_kept, written.fp8_quantized) == (0, 7)
    for name, matrix in values.items():
        if MATRIX.search(name) is None:
            assert found[name].equal(matrix), name
            continue
        codes, scales = by_ml_dtypes(matrix.numpy(), (128, 128))
        assert np.array_equal(found[name].view(torch.uint8).numpy(), codes), name
        assert np.array_equal(found[f"{name}_scale_inv"].numpy(), scales), name
        spread = expanded(found[f"{name}_scale_inv"], matrix.shape, (128, 128))
        # Half of a step of three bits of mantissa, or of the subnormal codes.
        apart = (found[name].float() * spread - matrix).abs()
        assert (apart <= torch.maximum(matrix.abs() / 16, spread * 2.0**-10)).all(), name


def test_one_weight_that_has_changed_has_new_codes(folder: Path, tmp_path: Path) -> None:
    """As one that was trained: the values of a checkpoint are compared with those of the codes beside it."""
    other = tmp_path / "other"
    other.mkdir()
    held = load_file(folder / MODEL)
    changed = next(name for name in held if name.endswith("o_proj.weight"))
    codes = held[changed].view(torch.uint8).clone()
    codes[0, 0] ^= 1
    save_file({**held, changed: codes.view(torch.float8_e4m3fn)}, other / MODEL, metadata={"format": "pt"})
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    import_weights(WeightsImport(folder=folder, out=tmp_path / "kept", keeps_fp8=True))
    import_weights(WeightsImport(folder=other, out=tmp_path / "trained"))
    written, found = exported(tmp_path / "trained", tmp_path / "back", prediction_layers=tmp_path / "kept")
    assert written.fp8_quantized == 1
    del held[changed], held[f"{changed}_scale_inv"]
    assert_same_bytes({name: tensor for name, tensor in found.items() if changed not in name}, held)


@pytest.mark.parametrize("block", [(128, 128), (1, 32), (96, 100)])
def test_edge_values(block: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    ordinary = draw.standard_normal((120, 130)).astype(np.float32) * np.float32(2.0) ** draw.integers(-20, 20, (120, 1))
    ordinary[:40, :60] = 0
    ordinary[50, ::7], ordinary[51, ::7] = 448.0, -(2.0**-9)
    codes, scales = written_as_fp8(ordinary, block)
    expected = by_ml_dtypes(ordinary, block)
    np.testing.assert_array_equal(codes & 127, expected[0] & 127)
    np.testing.assert_array_equal(scales, expected[1])
    ordinary[0, 0], ordinary[119, 129] = np.inf, np.nan
    codes, scales = written_as_fp8(ordinary, block)
    assert np.isnan(scales[0, 0])
    assert np.isnan(scales[-1, -1])


def test_what_cannot_be_kept_or_written_is_refused(tmp_path: Path) -> None:
    plain = made_folder(tmp_path / "plain", "llama3-test", {"num_layers": "1"}).path
    with pytest.raises(InputError) as caught:
        import_weights(WeightsImport(folder=plain, out=tmp_path / "out", keeps_fp8=True))
    assert str(caught.value) == f"{plain}: no weight is FP8, whose codes could be kept. Leave out --keep-fp8."
    (plain / "config.json").unlink()
    named = {"model": "llama3-test", "settings": {"num_layers": "1", "vocab": "256"}}
    import_weights(WeightsImport(folder=plain, out=tmp_path / "out", **named))  # pyright: ignore
    # The architecture has a class of transformers: its configuration is written, with blocks of 128 x 128.
    export_weights(WeightsExport(directory=tmp_path / "out", to=tmp_path / "back", fp8=True))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    # No class rotates Llama's neighbours.
    named["settings"] = {**named["settings"], "rope.interleaved": "true"}
    import_weights(WeightsImport(folder=plain, out=tmp_path / "other", **named))  # pyright: ignore
    with pytest.raises(InputError) as caught:
        export_weights(WeightsExport(directory=tmp_path / "other", to=tmp_path / "none", fp8=True, **named))  # pyright: ignore
    assert str(caught.value) == (
        "--fp8 needs a configuration, which says what has one scale, and the checkpoint has none. Give it with --config."
    )
