"""Model folders that are incomplete, damaged or of another model: each error names what is wrong, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from shardwright.checkpoint import DamagedError, OwnedBox, RunPoint, TensorInfo, latest, save_checkpoint
from shardwright.checkpoint.reading import small
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights.exporting import WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.importing import Imported, WeightsImport, import_weights
from shardwright.training.optimizer import FIRST, SECOND
from tests.interop.published_folder import SMALL, made_folder

SETTINGS = {**SMALL, "num_layers": "2"}
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
WORD = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_folder(tmp_path_factory.mktemp("whole") / "folder", "llama3-test", {"num_layers": "2"}).path


@pytest.fixture(scope="module")
def whole_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = {"num_layers": "2", "tied": "true"}
    return made_folder(tmp_path_factory.mktemp("tied") / "folder", "llama3-test", tied).path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "folder"))


@pytest.fixture
def tied(whole_tied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_tied, tmp_path / "folder"))


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def imported(folder: Path, **options: object) -> Imported:
    return import_weights(WeightsImport(folder=folder, out=folder.parent / "out", **options))  # pyright: ignore


def refused(folder: Path, **options: object) -> str:
    """The error of an import, after which there is no file."""
    with pytest.raises(InputError) as error:
        imported(folder, **options)
    assert not list((folder.parent / "out").rglob("*"))
    return str(error.value).replace(str(folder), "FOLDER")


def test_what_is_missing_extra_or_of_another_shape_is_named(folder: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.upp_proj.weight"] = tensors.pop(UP)
        tensors[NORM] = tensors[NORM][:-1]
        tensors[HEAD] = tensors[HEAD].astype(np.int32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)

    edit(folder, change)
    assert sorted(refused(folder).splitlines()[1:]) == [
        "  'lm_head.weight': dtype: found I32, needed one of float32, bfloat16, float16",
        "  'model.layers.0.self_attn.q_proj.bias': extra, F32 (128,), not in the model",
        "  'model.layers.1.mlp.up_proj.weight': missing; the folder has 'model.layers.1.mlp.upp_proj.weight'",
        "  'model.layers.1.mlp.upp_proj.weight': extra, F32 (768, 256), not in the model",
        "  'model.norm.weight': shape: found (255,), needed (256,)",
    ]


def test_a_layer_too_many(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    error = refused(folder)
    assert error.startswith("FOLDER: its tensors are not those of its config.json, and nothing was written:\n")
    assert "  'model.layers.1.mlp.up_proj.weight': extra, F32 (768, 256), not in the model\n" in error
    assert len(error.splitlines()) == 1 + 9


def test_a_second_copy_of_tied_embeddings(tied: Path) -> None:
    edit(tied, lambda tensors: tensors.update({HEAD: tensors[WORD].copy()}))
    (left_out,) = imported(tied).left_out
    assert left_out.names == (HEAD,)


def test_another_head_than_the_tied_embeddings(tied: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[HEAD] = tensors[WORD].copy()
        tensors[HEAD][-1, -1] += 1

    edit(tied, change)
    assert f"'{HEAD}' is not equal to '{WORD}'" in refused(tied)


def test_prediction_layers_are_named_and_left_out(folder: Path) -> None:
    name = "model.layers.2.eh_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    assert f"'{name}': extra" in refused(folder)
    configure(folder, num_nextn_predict_layers=1)
    (left_out,) = imported(folder).left_out
    assert left_out.names == (name,)


def test_layers_of_several_dtypes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].astype(np.float16)}))
    assert "both belong to 'layers.mlp.up', which has one dtype. Give it with --dtype." in refused(folder)
    assert imported(folder, dtype="float32").dtypes == ("float32",)


def test_folders_without_their_files(folder: Path) -> None:
    assert refused(folder.parent / "none").endswith(f"Give a folder with config.json and {MODEL} or {INDEX}.")
    (folder / INDEX).write_text("{}")
    assert refused(folder) == f"FOLDER: it has {MODEL} and {INDEX}, and they may differ. Move one of them away."
    (folder / INDEX).unlink()
    (folder / MODEL).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is pickled, and is never read" in refused(folder)
    (folder / MODEL).mkdir()
    assert refused(folder) == f"FOLDER/{MODEL}: not a regular file. A safetensors file is needed."


def damage(data: bytes, how: str) -> bytes:
    num = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + num])
    if how == "truncated":
        return data[:-100]
    if how == "longer":
        return data + b"0000"
    if how == "short":
        return data[:5]
    if how == "a long header":
        return (10**9).to_bytes(8, "little") + data[8:]
    if how == "no JSON":
        return data[:8] + b"x" * num + data[8 + num :]
    if how == "a gap":
        header[UP]["data_offsets"] = [offset + 4 for offset in header[UP]["data_offsets"]]
    if how == "bytes":
        header[UP]["shape"] = [1, 1]
    if how == "a negative dim":
        header[UP]["shape"] = [-256, -128]
    if how == "no dtype":
        del header[UP]["dtype"]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + num :]


@pytest.mark.parametrize(
    ("how", "named"),
    {
        "truncated": "the file is incomplete or damaged",
        "longer": "the file is incomplete or damaged",
        "short": "not a complete safetensors file: it has 5 bytes",
        "a long header": "a header of 1,000,000,000 follows",
        "no JSON": "not JSON",
        "a gap": f"'{UP}' starts at byte",
        "bytes": f"tensor '{UP}', data_offsets: found 786,432 bytes, needed 4 for F32 (1, 1)",
        "a negative dim": f"tensor '{UP}', shape: found [-256, -128], needed a list of whole numbers, at least 0 each",
        "no dtype": f"tensor '{UP}': the field 'dtype' is missing",
    }.items(),
)
def test_a_damaged_file(how: str, named: str, folder: Path) -> None:
    (folder / MODEL).write_bytes(damage((folder / MODEL).read_bytes(), how))
    error = refused(folder)
    assert named in error
    assert error.startswith(f"FOLDER/{MODEL}: ")


def with_index(folder: Path) -> dict[str, str]:
    """The same folder with two files and an index."""
    tensors = load_file(folder / MODEL)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (place > 5)}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / MODEL).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


def test_a_clone_without_its_large_files(folder: Path) -> None:
    (folder / MODEL).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5f0c\nsize 4976698672\n")
    assert refused(folder) == (
        f"FOLDER/{MODEL}: it is a pointer of Git LFS, and not the file itself. `git lfs pull` in its folder fetches the files."
    )


def test_files_without_their_index(folder: Path) -> None:
    with_index(folder)
    (folder / INDEX).unlink()
    none = f"FOLDER: there is no {MODEL} and no {INDEX}."
    assert refused(folder) == (
        f"{none} Of 2 files, as model-00001-of-00002.safetensors, the index says what each has: fetch it too."
    )
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(folder) == f"{none} Rename model-00001-of-00002.safetensors, if it has all weights."


def test_a_file_in_place_of_its_folder(folder: Path) -> None:
    assert refused(folder / MODEL).endswith(
        f": it is a file. Give its folder, with config.json and {MODEL} or {INDEX}."
    )


def test_an_index_that_is_wrong(folder: Path) -> None:
    files = with_index(folder)
    second = "model-00002-of-00002.safetensors"

    def indexed(weight_map: object) -> str:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return refused(folder)

    assert "'../model.safetensors' is not the name of a .safetensors file next to the index" in indexed(
        {**files, UP: f"../{MODEL}"}
    )
    assert f"'x' should be in {second}, and is not." in indexed({**files, "x": second})
    assert f"FOLDER/{second}: it holds '{UP}', which {INDEX} does not place there." in indexed(
        {name: file for name, file in files.items() if name != UP}
    )
    assert "FOLDER/model-00003.safetensors: no such file." in indexed({**files, "x": "model-00003.safetensors"})
    assert "weight_map: found [], needed a mapping." in indexed([])
    (folder / INDEX).write_text("{}")
    assert refused(folder) == f"FOLDER/{INDEX}: the field 'weight_map' is missing."
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    assert imported(folder).num_published == len(files)


def test_the_model(folder: Path) -> None:
    assert refused(folder, model="llama3-test", settings={**SETTINGS, "rope.theta": "1e4"}).splitlines()[1:] == [
        "  rope.theta: 500000.0, not 10000.0"
    ]
    (folder / "config.json").unlink()
    assert refused(folder) == "FOLDER: there is no config.json. Give the model with --model, as llama3-8b."
    assert imported(folder, model="llama3-test", settings=SETTINGS).model.config is None


def test_a_folder_that_holds_a_checkpoint(folder: Path) -> None:
    imported(folder)
    with pytest.raises(InputError, match=r"already holds a checkpoint\. Give another --out"):
        imported(folder)


def test_a_file_that_becomes_shorter_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromfile", lambda *_, **__: np.zeros(0, np.uint32))
    assert "the file became shorter while" in refused(folder)


def test_memory_is_that_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(small, "KEPT_BYTES", 1 << 20)
    made = made_folder(tmp_path / "folder", "llama3-test", {"num_layers": "24"})
    (made.path / "config.json").unlink()
    num_bytes, largest = (made.path / MODEL).stat().st_size, 768 * 256 * 4
    peaks = []
    for do in (
        lambda: imported(made.path, model="llama3-test", settings={**SMALL, "num_layers": "24"}),
        lambda: export_weights(
            WeightsExport(
                directory=tmp_path / "out",
                to=tmp_path / "back",
                model="llama3-test",
                settings={**SMALL, "num_layers": "24"},
            )
        ),
    ):
        tracemalloc.start()
        do()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 * largest + small.KEPT_BYTES + (2 << 20) < num_bytes / 3


def test_an_export_replaces_no_folder(folder: Path) -> None:
    imported(folder)
    with pytest.raises(InputError, match="it exists already, and is never overwritten"):
        export_weights(WeightsExport(directory=folder.parent / "out", to=folder))


def test_an_export_of_another_model(folder: Path) -> None:
    imported(folder)
    out, to = folder.parent / "out", folder.parent / "back"
    with pytest.raises(InputError) as error:
        export_weights(WeightsExport(directory=out, to=to, model="llama3-test", settings={"vocab": "256"}))
    assert str(error.value).startswith(
        f"--model llama3-test and {out}/checkpoints/step-00000000 are not the same model"
    )
    assert not to.exists()


@pytest.mark.parametrize("kept", ["{", "[]", '{"model_type": "gpt2"}', '{"model_type": "llama", "hidden_act": "gelu"}'])
def test_a_configuration_in_a_checkpoint_that_is_none(kept: str, tmp_path: Path) -> None:
    metadata = {"hugging_face": {"config": kept, "experts": [], "settings": 1}}
    point = RunPoint(
        step=0, seed=0, data_position=0, model="x", layout_name="", layout_text="", mesh={}, metadata=metadata
    )
    directory = save_checkpoint(tmp_path, point, [], [])
    with pytest.raises(InputError) as error:
        export_weights(WeightsExport(directory=tmp_path, to=tmp_path / "back"))
    assert str(error.value).startswith(f"{directory}: config.json")


def test_a_window_that_is_shorter_than_the_rows_of_training(tmp_path: Path) -> None:
    """As earlier releases trained: with attention to the entire row."""
    metadata = {"hugging_face": {"config": '{"model_type": "mistral", "sliding_window": 16}'}, "length": 32}
    point = RunPoint(
        step=1, seed=0, data_position=0, model="x", layout_name="", layout_text="", mesh={}, metadata=metadata
    )
    save_checkpoint(tmp_path, point, [], [])
    with pytest.raises(
        InputError, match=r"trained on rows of 32 tokens with attention to all of them, and .* has a window of 16"
    ):
        export_weights(WeightsExport(directory=tmp_path, to=tmp_path / "back"))


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(folder.parent.iterdir())
    with pytest.raises(InputError, match=r"could not be written: No space left on device\. Nothing of it was kept"):
        export_weights(WeightsExport(directory=folder.parent / "out", to=folder.parent / "back"))
    assert sorted(folder.parent.iterdir()) == before


def test_a_damaged_checkpoint_is_not_exported(folder: Path) -> None:
    imported(folder)
    checkpoint = latest(folder.parent / "out").checkpoint
    assert checkpoint is not None
    [stored] = [box for box in checkpoint.parts.stored(0) if box.info.name == "layers.mlp.up"]
    with (checkpoint.directory / stored.file).open("r+b") as file:
        file.seek(stored.offset + 5)
        file.write(b"!")
    before = sorted(folder.parent.iterdir())
    with pytest.raises(DamagedError, match=r"tensor 'layers.mlp.up', box \[0:2,0:256,0:768\]"):
        export_weights(WeightsExport(directory=folder.parent / "out", to=folder.parent / "back"))
    assert sorted(folder.parent.iterdir()) == before


def test_a_run_s_checkpoint_without_its_moments(folder: Path) -> None:
    """Boxes that are halves of dims of all layers, as a run saves them, with moments beside the weights."""
    imported(folder)
    checkpoint = latest(folder.parent / "out").checkpoint
    assert checkpoint is not None
    infos, boxes = [], []
    for prefix in ("", FIRST, SECOND):
        for info in checkpoint.tensors.values():
            array = checkpoint.read_box(info.name)
            infos.append(TensorInfo(name=prefix + info.name, shape=info.shape, dtype=info.dtype))
            half = info.shape[-1] // 2
            for start, stop in ((0, half), (half, info.shape[-1])):
                box = Box((*(0 for _ in info.shape[1:]), start), (*info.shape[:-1], stop))
                boxes.append(OwnedBox(name=prefix + info.name, box=box, array=array[box.slices]))
    point = RunPoint(
        step=7, seed=0, data_position=0, model="llama3-test", layout_name="fsdp", layout_text="", mesh={"fsdp": 2}
    )
    save_checkpoint(folder.parent / "run", point, infos, boxes)
    to = folder.parent / "back"
    with pytest.raises(InputError) as error:
        export_weights(WeightsExport(directory=folder.parent / "run", to=to))
    assert "'layers.mlp.up': shape: found (2, 256, 768), needed (6, 256, 768)" in str(error.value)
    assert "The model was taken as llama3-test. Give another with --config, or with --model and --set." in str(
        error.value
    )
    exported = export_weights(WeightsExport(directory=folder.parent / "run", to=to, config=folder / "config.json"))
    assert exported.moments == 2 * len(checkpoint.tensors)
    needed, found = load_file(folder / MODEL), load_file(to / MODEL)
    assert needed.keys() == found.keys()
    assert all(np.array_equal(needed[name], found[name]) for name in needed)
    with safe_open(to / MODEL, "np") as file:
        assert file.metadata() == {"format": "pt"}
