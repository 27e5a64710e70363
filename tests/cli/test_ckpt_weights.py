"""`ckpt import huggingface` and `ckpt export huggingface`: output, exit codes and options that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.models import build
from tests.interop.published_folder import made_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"num_layers": "2", "tied": "true"}
    return made_folder(tmp_path_factory.mktemp("folders") / "folder", "llama3-test", settings, shard="500KB").path


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def test_both_ways(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "import", "huggingface", str(folder), "--out", "out", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out == (
        "imported to out/checkpoints/step-00000000\n"
        "  model    llama3-test --set num_layers=2 vocab=256 tied=true\n"
        "  weights  20 published tensors as 11 of ours, 3.38 MiB in bfloat16\n"
        "  files    generation_config.json\n"
    )
    assert main(["ckpt", "export", "huggingface", "out", "--out", "back"]) == 0
    assert capsys.readouterr().out == (
        "exported to back\n"
        "  from         out/checkpoints/step-00000000\n"
        "  model        llama3-test --set num_layers=2 vocab=256 tied=true\n"
        "  weights      20 published tensors, 3.38 MiB in 1 file\n"
        "  config.json  copied, 'dtype' bfloat16\n"
        "  files        generation_config.json\n"
    )


def test_both_ways_by_an_object_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, back in (("here", "from-here"), ("memory://cli/weights", "from-there")):
        assert main(["ckpt", "import", "huggingface", str(folder), "--out", out]) == 0
        assert f"imported to {out}/checkpoints/step-00000000\n" in capsys.readouterr().out
        assert main(["ckpt", "verify", out]) == 0
        assert main(["ckpt", "export", "huggingface", out, "--out", back]) == 0
    files = {path.name: path.read_bytes() for path in Path("from-here").iterdir()}
    assert {path.name: path.read_bytes() for path in Path("from-there").iterdir()} == files
    assert "generation_config.json" in files


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "import", "huggingface", str(folder), "--out", "out", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["model"], value["directory"]) == ("llama3-test", "out/checkpoints/step-00000000")
    assert build(value["model"], value["settings"]).num_parameters * 4 == value["bytes"]
    step = value["directory"]
    assert main(["ckpt", "export", "huggingface", step, "--out", "back", "--max-file-bytes", "1", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["num_files"], value["num_tensors"], value["config"], value["moments_left_out"]) == (20, 20, True, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "import huggingface none --out out": "none: no such folder.",
        "import huggingface FOLDER --out out --set num_layers=2": "--set is for a model that --model gives.",
        "import huggingface FOLDER --out out --model llama4-8b": "no model 'llama4-8b'.",
        "export huggingface out --out s3://bucket/back": "s3://bucket/back: a folder of this machine is needed here.\n",
        "import huggingface s3://bucket/in --out out": "s3://bucket/in: a folder of this machine is needed here.\n",
        "export huggingface none --out back": "none: there is no checkpoint here.",
        "export huggingface none --out back --max-file-bytes 0": "--max-file-bytes is 0, and must be at least 1.",
        "export huggingface none --out back --config c --model m": "--config gives the model.",
    }.items(),
)
def test_what_is_refused(arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", *arguments.replace("FOLDER", str(folder)).split()]) == 2
    assert capsys.readouterr().err.startswith(f"shardwright: {message}")
