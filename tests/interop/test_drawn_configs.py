"""Configurations that people publish, drawn, and those that are accepted: what both engines compute is what transformers computes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwright.cli.main import main
from tests.interop.drawn_configs import STATED, TOLERANCE, comparisons


def test_none_that_is_accepted_computes_something_else() -> None:
    """PyTorch computes each, and JAX, which compiles a program for it, every sixth; the command beside this file does both for all."""
    results = comparisons(60, 7, every_on_jax=6)
    assert [result for result in results if result.outcome == "different"] == []
    outcomes = Counter(result.outcome for result in results)
    assert outcomes["equal"] >= 20
    assert outcomes["refused"] >= 10
    accepted = {result.values["model_type"] for result in results if result.outcome == "equal"}
    assert accepted >= {"llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3"}
    assert max(result.difference for result in results) <= TOLERANCE


def usual(kind: str) -> dict[str, Any]:
    stated = {key: choices[0] for key, choices in STATED["deepseek_v3" if kind == "kimi_k2" else kind].items()}
    return {"model_type": kind, **stated, "max_position_embeddings": 4096}


@pytest.mark.parametrize("kind", ["mistral", "kimi_k2"])
def test_a_folder_comes_back_as_it_was(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = usual(kind)
    config = transformers.AutoConfig.for_model(**{**values, "model_type": kind.replace("kimi_k2", "deepseek_v3")})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    first, out, back = tmp_path / "first", tmp_path / "out", tmp_path / "back"
    model.save_pretrained(first)
    (first / "config.json").write_text(json.dumps({**values, "dtype": "float32"}))
    assert main(["ckpt", "import", "huggingface", str(first), "--out", str(out)]) == 0
    assert main(["ckpt", "export", "huggingface", str(out), "--out", str(back)]) == 0
    said = capsys.readouterr().out
    assert (back / "config.json").read_bytes() == (first / "config.json").read_bytes()
    if kind == "kimi_k2":
        assert "training here lacks the auxiliary loss that balances the experts" in " ".join(said.split())
        (back / "config.json").write_text(json.dumps({**values, "model_type": "deepseek_v3"}))
    again = type(model).from_pretrained(back).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
