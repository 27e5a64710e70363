"""What a model's configuration says of training alone is a warning of every verb, for a file as for a model by its name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.typed.request import TypedRequest, planned
from shardwright.core.model.architecture import architecture_values
from shardwright.interop.hugging_face.config import model_of
from shardwright.interop.hugging_face.published import parse_config
from shardwright.interop.hugging_face.written_config import written_config
from shardwright.models import build, names
from tests.cli.locks import typing
from tests.cli.one_request import resolved

PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"router_aux_loss_coef": 0.02, "output_router_logits": False, "attention_dropout": 0.0},
    "mixtral-8x22b": {"router_aux_loss_coef": 0.001, "output_router_logits": False, "attention_dropout": 0.0},
    "deepseek3-671b": {"aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 1},
    "deepseek3-16b": {"aux_loss_alpha": 0.001, "seq_aux": True},
}
"""What mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1, deepseek-ai/DeepSeek-V3-Base and DeepSeek-V2-Lite have in their files."""

EXPERTS = [name for name in names() if build(name).top_k is not None]


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return typing(capsys)


def config(name: str, **keys: Any) -> dict[str, Any]:
    """The file of a model by its name, with other keys."""
    text = written_config(architecture_values(build(name)), "float32")
    assert text is not None
    return {**json.loads(text), **keys}


def warned(found: dict[str, Any]) -> dict[str, str]:
    """The parts that a plan's warnings say are lacking, by key."""
    return {
        finding["where"].rpartition(": ")[2].strip("'"): finding["found"].partition("training here lacks ")[2]
        for finding in found["findings"]
        if finding["code"] == "SW123" and finding["severity"] == "warning"
    }


def parts(name: str) -> dict[str, str]:
    return {row.key: row.part for row in build(name).training_only}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_by_its_name_lacks_what_its_published_file_lacks(name: str):
    of_file = model_of(parse_config(json.dumps(config(name, **PUBLISHED[name])), "config.json")).table.training_only
    of_name = build(name).training_only
    assert [(row.key, f"{row.value} in the published configuration", row.part) for row in of_file] == [
        (row.key, row.value, row.part) for row in of_name
    ]


def test_every_model_with_experts_has_it_and_no_other():
    assert EXPERTS
    for name in names():
        assert bool(build(name).training_only) == (name in EXPERTS), name


@pytest.mark.parametrize("name", ["mixtral-test", "deepseek3-test"])
def test_every_verb_warns_of_a_model_by_its_name(name: str, typed):
    wanted = parts(name)
    plan = json.loads(typed("plan", name, "--json")[1])
    assert warned(plan) == wanted
    for verb, more in (
        ("compile", ("--chips", "cpu:8")),
        ("train", ("--devices", "8", "--steps", "1", "--out", "run")),
    ):
        request = resolved(verb, (name, *more))
        assert isinstance(request, TypedRequest)
        assert warned(planned(request).to_json()) == wanted, verb
    _, out, err = typed("lock", name, "--out", "a.lock.json")
    assert err == ""
    lock = json.loads(Path("a.lock.json").read_text(encoding="utf-8"))
    assert {row["key"]: row["part"] for row in lock["training_only"]} == wanted
    _, said, _ = typed("diff", "ep", "a.lock.json", "--model", name)
    for key, part in wanted.items():
        assert f"  warning      training here lacks {part} ('{key}': " in out
        assert f"Training here lacks {part} ('{key}': " in " ".join(said.split())
    difference = json.loads(typed("diff", "ep", "ep", "--model", name, "--json")[1])
    for side in ("before", "after"):
        assert {row["key"]: row["part"] for row in difference["training_only"][side]} == wanted


def test_a_dense_model_says_nothing_of_it(typed):
    typed("lock", "llama3-test", "--out", "a.lock.json")
    assert "training_only" not in json.loads(Path("a.lock.json").read_text(encoding="utf-8"))
    assert "training_only" not in json.loads(typed("diff", "fsdp", "fsdp", "--model", "llama3-test", "--json")[1])
    assert warned(json.loads(typed("plan", "llama3-test", "--json")[1])) == {}


def drawn_training() -> list[tuple[str, dict[str, Any], set[str]]]:
    """A model, keys of its file, and those of them that change training."""
    draw, cases = random.Random(11), []
    values: dict[str, dict[str, tuple[Any, ...]]] = {
        "mixtral-test": {
            "router_aux_loss_coef": (0.0, 0.02),
            "router_jitter_noise": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
            "output_router_logits": (False, True),
        },
        "deepseek3-test": {
            "aux_loss_alpha": (0, 0.001),
            "seq_aux": (False, True),
            "num_nextn_predict_layers": (0, 1),
            "attention_dropout": (0.0, 0.1),
        },
    }
    for number in range(6):
        name = draw.choice(list(values))
        keys = {key: draw.choice(options) for key, options in values[name].items()}
        cases.append(
            (name, keys if number else dict.fromkeys(keys, 0), {key for key, value in keys.items() if value and number})
        )
    return cases


@pytest.mark.parametrize(("name", "keys", "changed"), drawn_training())
def test_a_file_says_its_own_in_place_of_what_the_name_says(name, keys, changed, typed):
    Path("config.json").write_text(json.dumps(config(name, **keys)), encoding="utf-8")
    assert set(warned(json.loads(typed("plan", "./config.json", "--json")[1]))) == changed
    typed("lock", "./config.json", "--out", "a.lock.json")
    before = Path("a.lock.json").read_text(encoding="utf-8")
    assert {row["key"] for row in json.loads(before)["training_only"]} == changed
    # The lock has the model by its name, and what its file said.
    assert typed("check", "--update", "a.lock.json")[0] == 0
    assert Path("a.lock.json").read_text(encoding="utf-8") == before


def test_a_lock_of_an_older_release_is_as_it_was(typed):
    typed("lock", "mixtral-test", "--out", "a.lock.json")
    lock = json.loads(Path("a.lock.json").read_text(encoding="utf-8"))
    del lock["training_only"]
    Path("a.lock.json").write_text(json.dumps(lock), encoding="utf-8")
    code, out, _ = typed("check", "a.lock.json")
    assert (code, out.startswith("a.lock.json: nothing moved")) == (0, True)
