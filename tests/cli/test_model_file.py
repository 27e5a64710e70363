"""MODEL as a model folder of Hugging Face: the same plan as of the model by name, with what the configuration says besides."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.core.model.architecture import architecture_values
from shardwright.interop.hugging_face.hub_names import HUB
from shardwright.interop.hugging_face.written_config import written_config
from shardwright.models import build

SETTINGS = {"num_layers": "2", "embed": "64", "vocab": "300"}
ON = ["--layout", "fsdp", "--mesh", "fsdp=2", "--batch", "8", "--length", "32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


def made(path: Path, **more: Any) -> Path:
    text = written_config(architecture_values(build("llama3-test", SETTINGS)), "float32")
    assert text is not None
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**json.loads(text), **more}))
    return path


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_folder_is_the_model_of_its_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["plan", "llama3-test", "--set", *(f"{name}={value}" for name, value in SETTINGS.items()), *ON, "--json"]
    expected, quiet = answer(named, capsys)
    assert quiet == ""
    for path in (folder, folder / "config.json"):
        found, said = answer(["plan", str(path), *ON, "--json"], capsys)
        assert found == expected
        assert said == f"{path} is llama3-test --set num_layers=2 embed=64 vocab=300\n"


def test_an_option_has_precedence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = answer(
        ["plan", "llama3-test", "--set", "num_layers=1", "embed=64", "vocab=300", *ON, "--json"], capsys
    )
    found, _ = answer(["plan", str(folder), "--set", "num_layers=1", *ON, "--json"], capsys)
    assert found == expected


BESIDES = {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "use_qk_norm": True}
"""Something that changes only training, and a key that the class does not have."""


def test_what_the_configuration_has_besides_is_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "model", **BESIDES)
    found, said = answer(["plan", str(path), *ON, "--json"], capsys)
    assert found["dtype"] == "bfloat16"
    assert said == f"{path} is llama3-test --set num_layers=2 embed=64 vocab=300 --dtype bfloat16\n"
    warnings = [finding for finding in found["findings"] if finding["severity"] == "warning"]
    assert [(finding["code"], finding["where"].rpartition(": ")[2]) for finding in warnings] == [
        ("SW111", "'use_qk_norm'"),
        ("SW123", "'attention_dropout'"),
    ]
    assert warnings[1]["found"] == "0.1: training here lacks dropout of attention"


@pytest.mark.parametrize(
    "verb",
    [
        ["plan", "MODEL", *ON],
        ["train", "MODEL", *ON[:4], "--length", "32", "--batch", "7", "--devices", "2", "--steps", "1", "--out", "OUT"],
        ["compile", "MODEL", *ON, "--engine", "torch", "--chips", "h100:1x2"],
        ["lock", "MODEL", *ON, "--out", "OUT.lock.json"],
        ["diff", "fsdp", "ddp", "--model", "MODEL", "--batch", "8", "--length", "32", "--devices", "2"],
        ["import", "huggingface", "MODEL/config.json"],
    ],
    ids=lambda verb: verb[0],
)
def test_every_verb_says_it(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "model", **BESIDES)
    places = {"MODEL": str(path), "OUT": str(tmp_path / "out")}
    arguments = [functools.reduce(lambda text, place: text.replace(*place), places.items(), word) for word in verb]
    main(arguments)
    out, err = capsys.readouterr()
    assert "training here lacks dropout of attention" in " ".join((out + err).lower().split())
    assert "'use_qk_norm'" in out + err


@pytest.mark.parametrize("kind", ["mistral", "mixtral"])
def test_rows_beyond_a_window_are_refused_by_every_verb(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "vocab_size": 300, "num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, "sliding_window": 32}))
    assert answer(["plan", str(path), *ON, "--json"], capsys)[0]["findings"][0]["severity"] != "error"
    longer = [*ON[:-1], "64"]
    assert main(["plan", str(path), *longer]) == 1
    out = capsys.readouterr().out
    assert "rows of 64 tokens, where each token of" in " ".join(out.split())
    assert "--length 32" in out
    assert main(["train", str(path), *longer, "--steps", "1", "--out", str(tmp_path / "run"), "--devices", "2"]) == 1
    assert main(["lock", str(path), *ON, "--out", str(tmp_path / "a.lock.json")]) == 0
    # The window is a dimension of the model, so a lock has it.
    assert json.loads((tmp_path / "a.lock.json").read_text())["request"]["set"]["window"] == "32"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta-llama/Llama-3.1-8B", "nothing is downloaded. It is llama3-8b here."),
        (
            "unsloth/Llama-3.1-8B",
            "nothing is downloaded. meta-llama/Llama-3.1-8B, if it is the same, is llama3-8b here.",
        ),
        (
            "owner/name",
            "it is not known here, and nothing is downloaded. For another model, or for its weights, give the path",
        ),
    ],
)
def test_a_name_on_the_hub(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", sorted(set(HUB.values())))
def test_what_a_name_on_the_hub_is_here_can_be_built(arguments: str) -> None:
    name, *words = arguments.replace(" --set ", " ").split()
    assert build(name, dict(word.split("=") for word in words)).num_parameters > 1e9


def test_a_lock_has_the_name_and_the_settings(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "a.lock.json"
    assert main(["lock", str(folder), *ON, "--out", str(lock)]) == 0
    (folder / "config.json").unlink()
    # The folder is not needed again.
    assert main(["check", str(lock)]) == 0
    assert json.loads(lock.read_text())["request"]["model"] == "llama3-test"
    assert main(["diff", "fsdp", str(lock), "--mesh", "fsdp=4"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "empty/config.json: no such file."),
        ("./nothing", "nothing: no such file."),
        ("nothing.json", "nothing.json: no such file."),
        ("other", "no family here has model_type 'gpt2'."),
        ("nothing", "no model 'nothing'."),
    ],
)
def test_what_is_no_model_is_one_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    made(tmp_path / "other", model_type="gpt2")
    assert main(["plan", name, *ON]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_folder_of_a_model_s_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-test").mkdir()
    assert main(["plan", "llama3-test", *ON]) == 0
    assert capsys.readouterr().err == ""
