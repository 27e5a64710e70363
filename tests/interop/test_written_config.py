"""The config.json that is written for a model: transformers computes the same with it, and it is read as the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from shardwright.cli.main import main
from shardwright.core.model.architecture import architecture_values
from shardwright.core.model.table import ModelTable
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.published import parse_config
from shardwright.interop.hugging_face.written_config import CONTEXT, written_config
from shardwright.models import build, names
from tests.engine_jax.commands import TEXT
from tests.interop.published_folder import loaded_again
from tests.models.published import CASES, LENGTH, ROWS, model_class, published_logits
from tests.models.random_weights import random_weights
from tests.models.to_published import to_published

INTERLEAVED = {"rope.interleaved": "true"}
NO_CLASS = {
    "neighbours in a pair": ("llama3-test", INTERLEAVED),
    "neighbours in a pair of Mixtral": ("mixtral-test", INTERLEAVED),
    "softmax and a bias": ("deepseek3-test", {"scoring": "softmax"}),
    "sigmoid without a bias": ("deepseek3-test", {"routing_bias": "false"}),
    "normalized weights of DeepSeek-V2": ("deepseek3-test", {"scoring": "softmax", "routing_bias": "false"}),
}


def config_of(table: ModelTable) -> str:
    text = written_config(architecture_values(table), "float32")
    assert text is not None
    return text


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES)
def test_transformers_computes_the_same_with_it(name: str, settings: dict[str, str], tmp_path: Path) -> None:
    table = build(name, {**settings, "num_layers": "3", "vocab": "256"})
    weights, tokens = random_weights(table), np.random.default_rng(1).integers(0, 256, (ROWS, LENGTH))
    (tmp_path / "theirs").mkdir()
    theirs = published_logits(table, weights, tokens, tmp_path / "theirs")
    published = {
        name: np.ascontiguousarray(array)
        for weight in table.weights
        for name, array in to_published(weight, weights[weight.name])
    }
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(config_of(table))
    with torch.no_grad():
        logits = loaded_again(tmp_path)(torch.from_numpy(tokens)).logits.numpy()
    assert logits.dtype == np.float32
    assert np.std(theirs) > 0.5
    np.testing.assert_array_equal(logits, theirs)


@pytest.mark.parametrize("name", names())
def test_every_size_is_read_as_itself(name: str) -> None:
    table = build(name)
    found = model_of(parse_config(config_of(table), "config.json")).table
    assert architecture_values(found) == architecture_values(table)
    assert found.weights == table.weights


def test_random_models_are_read_as_themselves() -> None:
    random = np.random.default_rng(0)

    def one_of(*values: Any) -> str:
        return str(values[random.integers(len(values))])

    for _ in range(100):
        heads = int(one_of(1, 3, 8))
        settings = {
            "num_layers": one_of(1, 2, 5),
            "embed": one_of(24, 64),
            "num_heads": str(heads),
            "vocab": one_of(7, 50257),
            "norm_eps": one_of(1e-5, 3e-6),
            "initializer_stddev": one_of(0.006, 0.02),
            "rope.kind": one_of("default", "llama3", "yarn"),
            "rope.theta": one_of(500.0, 1e6),
            "rope.factor": one_of(1.0, 2.5),
            "mlp": one_of(8, 100),
        }
        name = one_of("llama3-test", "mixtral-test", "deepseek3-test")
        if name == "deepseek3-test":
            settings |= {
                "num_dense_layers": one_of(0, 1),
                "q_lora": one_of("none", 16),
                "num_shared_experts": one_of(0, 3),
            }
        else:
            settings |= {"num_kv_heads": one_of(1, heads), "head_dim": one_of(2, 32)}
        table = build(name, settings)
        found = model_of(parse_config(config_of(table), "config.json")).table
        assert found.weights == table.weights, settings
        ours, theirs = architecture_values(table), architecture_values(found)
        # A scaling has only the numbers that its kind reads.
        of_kind = {key for key in ours if not key.startswith("architecture.rope.")} | {"architecture.rope.kind"}
        assert {key: ours[key] for key in of_kind} == {key: theirs[key] for key in of_kind}, settings
        assert found.architecture.rope.inverse_frequencies(8) == table.architecture.rope.inverse_frequencies(8)
        assert found.architecture.rope.score_factor == table.architecture.rope.score_factor


@pytest.mark.parametrize(("name", "settings"), NO_CLASS.values(), ids=NO_CLASS)
def test_an_architecture_without_a_class_has_none(name: str, settings: dict[str, str]) -> None:
    assert written_config(architecture_values(build(name, settings)), "float32") is None


@pytest.mark.parametrize(
    "edit", [{"stacks": 3}, {"stacks": [{}]}, {"experts.width": 0}, {"rope.kind": "linear"}, {"rope.factor": None}]
)
def test_values_of_no_architecture_have_none(edit: dict[str, Any]) -> None:
    values = architecture_values(build("deepseek3-test"))
    assert (
        written_config({**values, **{f"architecture.{key}": value for key, value in edit.items()}}, "float32") is None
    )
    assert written_config({}, "float32") is None


def test_a_context_is_as_long_as_the_rows_of_the_run() -> None:
    values = architecture_values(build("mixtral-test"))
    for length, context in ((128, CONTEXT), (3 * CONTEXT, 3 * CONTEXT)):
        config = json.loads(written_config({**values, "length": length}, "float32") or "")
        assert config["max_position_embeddings"] == context


def test_a_run_from_scratch_is_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    model = ["llama3-test", "--set", "num_layers=1", "embed=64", "vocab=300"]
    where = ["--layout", "fsdp", "--mesh", "fsdp=1", "--devices", "1", "--data", TEXT]
    assert main(["train", *model, *where, "--batch", "2", "--length", "16", "--steps", "1", "--out", str(run)]) == 0
    capsys.readouterr()
    # The model is that of the checkpoint: its dimensions need not be given again.
    assert main(["ckpt", "export", "huggingface", str(run), "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "  config.json  written from the architecture; the ids of special tokens are null\n" in out
    config = transformers.AutoConfig.from_pretrained(folder)
    assert isinstance(loaded_again(folder), model_class(config))
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (1, 64, 300)
    # And it comes back.
    assert main(["ckpt", "import", "huggingface", str(folder), "--out", str(tmp_path / "again")]) == 0
