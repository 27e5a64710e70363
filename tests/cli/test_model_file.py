"""MODEL as a model folder of Hugging Face: the same plan as of the model by name, with what the configuration says besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.core.model.architecture import architecture_values
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


def test_what_the_configuration_has_besides_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "model", sliding_window=16, torch_dtype="bfloat16")
    found, said = answer(["plan", str(path), *ON, "--json"], capsys)
    assert found["dtype"] == "bfloat16"
    assert said.startswith(f"{path} is llama3-test --set num_layers=2 embed=64 vocab=300 --dtype bfloat16\n")
    assert "SW123" in said
    assert "'sliding_window'" in said


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
