"""Names, paths and headers that are too long: one message with both numbers, whichever verb gets them, and soon."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.bounds import BOUNDS
from shardwright.core.findings.nearest import MOST_COMPARED, nearest
from shardwright.interop.hugging_face.weights.files import safetensors_file

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TRAIN = ["--layout", "fsdp", "--mesh", "fsdp=1", "--steps", "1"]
VERBS: tuple[Callable[[str], list[str]], ...] = (
    lambda path: ["plan", path],
    lambda path: ["plan", f"{path}.json"],
    lambda path: ["ckpt", "show", path],
    lambda path: ["ckpt", "verify", path],
    lambda path: ["ckpt", "import", "huggingface", path, "--out", "out"],
    lambda path: ["ckpt", "import", "huggingface", "folder", "--out", path],
    lambda path: ["ckpt", "import", "orbax", path, "--out", "out"],
    lambda path: ["ckpt", "export", "huggingface", path, "--out", "to"],
    lambda path: ["ckpt", "reshard", path, "--layout", "fsdp", "--out", "out"],
    lambda path: ["train", path, *TRAIN, "--out", "out"],
    lambda path: ["train", "llama3-test", *TRAIN, "--out", path],
    lambda path: ["train", "llama3-test", *TRAIN, "--out", "out", "--weights", path],
    lambda path: ["compile", path, "--chips", "h100:1x8"],
)


@pytest.mark.parametrize("number", range(len(VERBS)))
def test_a_path_that_no_file_system_holds(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(number)
    name = draw.choice(["x", "é", "a b"]) * draw.randint(256, 2000)
    deep = "/".join(["folder"] * draw.randint(700, 3000))
    for path, counted in ((name, "name of a file"), (f"folder/{name}/step", "name of a file"), (deep, "path")):
        assert main(VERBS[number](path)) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.endswith(f", and must be at most {BOUNDS[counted].most:,}. {BOUNDS[counted].fix}"), line
        assert len(line) < 300
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize(
    "name", ["model\0.safetensors", "x" * 300 + ".safetensors", "a/b.safetensors", "model\n.safetensors"]
)
def test_a_name_in_an_index_that_no_file_has(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert main(["ckpt", "import", "huggingface", str(folder), "--out", str(folder.parent / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is not the name of a .safetensors file next to the index.")


def write_header(path: Path, num_tensors: int) -> None:
    names = {f"w{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(num_tensors)}
    text = json.dumps(names).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_header_with_more_tensors_than_any_model_is_not_parsed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    most = BOUNDS["tensors"].most
    write_header(folder / "model.safetensors", most + 1)
    monkeypatch.setattr(safetensors_file, "parse_json", None)
    assert main(["ckpt", "import", "huggingface", str(folder), "--out", str(folder.parent / "out")]) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {folder / 'model.safetensors'}: the number of its tensors is {most + 1:,}, and must be at most {most:,}. "
        f"Fetch the file again, or divide the model.\n"
    )


def test_of_very_many_names_none_is_compared() -> None:
    assert nearest("layer7", (f"layers{number}" for number in range(MOST_COMPARED))) == "layers7"
    assert nearest("layer7", (f"layers{number}" for number in range(MOST_COMPARED + 1))) is None
