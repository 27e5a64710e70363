"""`train --resume RUN`: the options of the run in a folder, those that are typed again, and what a run's folder says of it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from shardwright.cli.arguments.parsing import parse
from shardwright.cli.arguments.verbs import tree, verb_of
from shardwright.cli.interop.import_options import Shardwright
from shardwright.cli.main import main
from shardwright.cli.typed import written
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.cli.typed.written import arguments_of, with_options_of_its_run

TRAIN = ["train", "llama3-test", "--layout", "fsdp", "--mesh", "fsdp=2", "--set", "num_layers=1", "--batch", "2"]
TRAIN += ["--length", "32", "--steps", "4", "--warmup", "0", "--data", __file__]

DRAWN: tuple[tuple[str, ...], ...] = (
    ("--layout", "tp"),
    ("--mesh", "tensor=2"),
    ("--move", "attention=ring"),
    ("--engine", "torch"),
    ("--batch", "8"),
    ("--length", "64"),
    ("--devices", "4"),
    ("--set", "num_layers=2", "vocab=512"),
    ("--set", "embed=64"),
    ("--weights-dtype", "bfloat16"),
    ("--moments-dtype", "bfloat16,float32"),
    ("--remat", "dots"),
    ("--microbatches", "2"),
    ("--expert-buffer", "1.25"),
    ("--optimizer", "lion"),
    ("--optimizer-set", "b2=0.95"),
    ("--average", "0.99"),
    ("--precision", "fp8-current"),
    ("--load-balance",),
    ("--lr", "0.01"),
    ("--weight-decay", "0"),
    ("--seed", "7"),
    ("--checkpoint-every", "5"),
    ("--keep", "2"),
    ("--keep-best", "2"),
    ("--best-of", "grad_norm"),
    ("--async-checkpoints",),
    ("--checkpoints", "elsewhere"),
    ("--weights", "start"),
    ("--weights-new", "embedding*", "x"),
    ("--weights-cast",),
    ("--tensorboard",),
    ("--log-every", "3"),
)
OF_ONE_START = (("--stop-after", "1"), ("--resume",), ("--change", "lr"), ("--json",), ("--stall-timeout", "9"))


def parsed(arguments: list[str]) -> TrainVerb:
    root = tree("shardwright", Shardwright)
    named, number = verb_of(root, arguments)
    verb = parse(named, root, arguments[number:], number + 1)
    assert isinstance(verb, TrainVerb)
    return verb


@pytest.mark.parametrize("seed", range(12))
def test_a_command_is_typed_again_as_it_was(seed: int) -> None:
    rng = Random(seed)
    options = [part for group in rng.sample(DRAWN, rng.randrange(len(DRAWN))) for part in group]
    of_one_start = [part for group in rng.sample(OF_ONE_START, rng.randrange(len(OF_ONE_START))) for part in group]
    base = ["train", "llama3-test", "--steps", "6", "--out", "run"]
    again = ["train", *arguments_of(parsed([*base, *options, *of_one_start])), "--out", "run"]
    assert parsed(again) == parsed([*base, *options])
    assert arguments_of(parsed(again)) == again[1:-2]


def test_an_option_takes_the_place_of_the_run_s_by_its_former_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = SimpleNamespace(arguments=["llama3-test", "--steps", "6", "--microbatches", "4"], directory=str(Path.cwd()))
    monkeypatch.setattr(written, "_start_of", lambda _: start)
    for resume in (["--resume", "run"], ["--resume=run"]):
        line = with_options_of_its_run(["train", *resume, "--micro_steps=2"])
        assert parsed(line).plan.microbatches == 2
        assert parsed(line).run.steps == 6


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run that stopped after 2 of 4 steps."""
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--out", "run", "--stop-after", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  to go on    shardwright train --resume run, on any layout"
    return tmp_path / "run"


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "run.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_goes_on_by_its_folder_alone(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    (run.parent / "elsewhere").mkdir()
    monkeypatch.chdir(run.parent / "elsewhere")
    assert main(["train", "--resume", "../run"]) == 0
    assert "finished after step 4 of 4" in capsys.readouterr().out
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["tokens_seen"] for step in steps] == [64, 128, 192, 256]
    first, stopped, second, finished = records(run)
    assert (first["event"], first["after_step"], first["command"][-2:]) == ("start", 0, ["--stop-after", "2"])
    assert (stopped["event"], stopped["ended"], stopped["step"]) == ("end", "stopped", 2)
    assert (second["after_step"], second["arguments"][:3]) == (2, ["llama3-test", "--layout", "fsdp"])
    assert (finished["ended"], finished["step"]) == ("finished", 4)
    assert {"host", "pid", "versions", "git", "time", "options", "mesh"} <= first.keys()
    assert first["options"]["lr"] == 3e-4
    assert first["versions"].keys() >= {"shardwright", "python", "jax"}
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert "llama3-test under fsdp" in log
    assert "stopped after step 2 of 4" in log
    assert "step 4/4  loss" in log


@pytest.mark.usefixtures("run")
def test_what_is_typed_again_is_compared_or_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "run", "--lr", "0.01"]) == 2
    assert "lr: was 0.0003, is 0.01; --lr 0.0003 keeps it" in capsys.readouterr().err
    assert (
        main(["train", "--resume", "run", "--lr", "0.01", "--change", "lr", "--layout", "tp", "--mesh", "tensor=2"])
        == 0
    )
    assert "resumed from run/checkpoints/step-00000002 (layout fsdp)" in capsys.readouterr().out
    # The next command goes on with what the last one changed.
    assert main(["train", "--resume", "run", "--steps", "5", "--change", "steps"]) == 0
    out = capsys.readouterr().out
    assert "llama3-test under tp" in out
    assert "finished after step 5 of 5" in out


def test_a_failure_is_recorded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--lr", "1e6", "--clip", "1e6", "--steps", "40", "--change", "lr,clip,steps"]
    assert main(["train", "--resume", "run", *changed]) == 1
    assert capsys.readouterr().err.startswith("shardwright: step ")
    assert records(run)[-1]["ended"] == "failed"
    assert "both must be finite" in records(run)[-1]["why"]
    assert "both must be finite" in (run / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", ""], "--resume is empty. Give the folder of a run, its --out."),
        (
            ["--resume", "nowhere"],
            "--resume nowhere: there is no such folder. Give the folder of a run, its --out; or a model",
        ),
        (["--resume", "empty"], "--resume empty: empty/run.jsonl does not say with which options the run was started."),
    ],
)
def test_a_folder_that_is_no_run(arguments: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.jsonl").write_text('{"event": "start"}\n{"event": "end"}\n\xff{', encoding="utf-8")
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_other_command_lines_are_as_they_are() -> None:
    for line in (
        "train a --out b --resume --steps 3",
        "train a --resume --out b",
        "plan a --resume b",
        "train --resume",
    ):
        assert with_options_of_its_run(line.split()) == line.split()


def test_sizes_of_another_layout_are_left_out(tmp_path: Path) -> None:
    start = {
        "event": "start",
        "directory": str(tmp_path),
        "arguments": ["m", "--mesh", "fsdp=2", "--devices", "2", "--seed", "3"],
    }
    (tmp_path / "run.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    line = ["train", "--resume", str(tmp_path), "--layout", "tp"]
    again = ["train", "m", "--resume", "--layout", "tp", "--seed", "3", "--out", str(tmp_path)]
    assert with_options_of_its_run(line) == again


@pytest.mark.parametrize(("typed", "place"), [("-steps 4", 4), ("--seed 1 x", 6), ("--lr fast", 5)])
def test_messages_number_the_arguments_as_they_were_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, place: int
) -> None:
    start = {"event": "start", "directory": str(tmp_path), "arguments": ["llama3-test", "--steps", "2", "--batch", "4"]}
    (tmp_path / "run.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    assert main(["train", "--resume", str(tmp_path), *typed.split()]) == 2
    assert f"argument {place}" in capsys.readouterr().err
