"""`shardwright train` up to the engine: the plan first, the options filled in, the devices simulated. No step is run here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright import InputError, Plan
from shardwright.cli.main import main
from shardwright.cli.running.train import ended
from shardwright.cli.typed import devices
from shardwright.cli.typed.devices import leave_out_absent_tpus, simulate_devices
from shardwright.report.text.units import pretty_bytes, pretty_seconds
from shardwright.training.options import Listener, RunOptions, RunOutcome
from tests.typed import once

ENGINE = "shardwright.engine_jax.training.run"
FLAG = "--xla_force_host_platform_device_count"
TRAIN = ["train", "llama3-test", "--steps", "20", "--out", "runs/a"]


@pytest.fixture
def calls(monkeypatch) -> list[tuple[RunOptions, Plan]]:
    """Stands in for the engine, and keeps what it was called with."""
    seen = []

    def train(run: RunOptions, plan: Plan, shown: Listener | None = None, **_: object) -> RunOutcome:
        seen.append((run, plan))
        if shown is not None:
            shown.say("the engine speaks")
        return RunOutcome(
            ended="stopped",
            step=10,
            loss=2.5,
            checkpoint=Path("runs/a/checkpoints/step-00000010"),
            metrics=Path("runs/a/metrics.jsonl"),
        )

    monkeypatch.setitem(sys.modules, ENGINE, SimpleNamespace(train=train))
    return seen


def test_the_engine_gets_the_options_and_the_plan(calls, capsys):
    assert main([*TRAIN, "--layout", "hsdp", "--stop-after", "10", "--lr", "1e-3", "--tokenizer", "t.json"]) == 0
    ((run, plan),) = calls
    assert replace(run, command=(), arguments=()) == RunOptions(
        steps=20,
        out=Path("runs/a"),
        stop_after=10,
        lr=1e-3,
        warmup=2,
        tokenizer=Path("t.json"),
    )
    assert run.last_step == 10
    assert (plan.request.layout.name, plan.request.table.name) == ("hsdp", "llama3-test")
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("llama3-test under hsdp\n")
    assert "--warmup 2 --data stdlib --weight-decay 0.1 --clip 1.0 --seed 0" in " ".join(out.split())
    assert out.endswith(
        "the engine speaks\n"
        "stopped after step 10 of 20, loss 2.5000\n"
        "  checkpoint  runs/a/checkpoints/step-00000010\n"
        "  metrics     runs/a/metrics.jsonl\n"
        "  to go on    shardwright train --resume runs/a, on any layout\n"
    )


def test_every_option_reaches_the_engine(calls):
    arguments = ["--data", "text", "--warmup", "0", "--weight-decay", "0", "--clip", "0.5", "--seed", "7", "--resume"]
    arguments += ["--checkpoint-every", "5", "--keep", "2", "--tensorboard", "--devices", "8", "--resume-from", "5"]
    arguments += ["--weights", "start", "--keep-every", "10", "--keep-every-hours", "6", "--keep-best", "3"]
    arguments += ["--best-of", "grad_norm", "--change", "lr, weight_decay", "--weights-cast"]
    arguments += ["--weights-new", "embedding*", "x", "--weights-skip", "head*", "--weights-skip", "tail"]
    assert main([*TRAIN, *arguments, "--json"]) == 0
    ((run, _),) = calls
    assert replace(run, command=(), arguments=()) == RunOptions(
        steps=20,
        out=Path("runs/a"),
        data="text",
        warmup=0,
        weight_decay=0.0,
        clip=0.5,
        seed=7,
        checkpoint_every=5,
        keep=2,
        keep_every=10,
        keep_every_hours=6,
        keep_best=3,
        best_of="grad_norm",
        weights=Path("start"),
        weights_new=("embedding*", "x"),
        weights_skip=("head*", "tail"),
        weights_cast=True,
        change=("lr", "weight-decay"),
        resume=True,
        resume_from=5,
        tensorboard=True,
        devices=8,
    )


def test_json_is_one_object_with_the_plan_and_the_end(calls, capsys):
    assert main([*TRAIN, "--json"]) == 0
    ((_, plan),) = calls
    data = json.loads(capsys.readouterr().out)
    assert data["plan"] == json.loads(json.dumps(plan.to_json()))
    assert data["run"] == {
        "ended": "stopped",
        "step": 10,
        "loss": 2.5,
        "checkpoint": "runs/a/checkpoints/step-00000010",
        "metrics": "runs/a/metrics.jsonl",
        "changes": [],
        "said": ["the engine speaks"],
    }


def test_a_finished_run_has_no_line_about_resuming():
    outcome = RunOutcome(ended="finished", step=20, loss=None, checkpoint=None, metrics=Path("m.jsonl"))
    text = ended(outcome, RunOptions(steps=20, out=Path("a")))
    assert text == "finished after step 20 of 20\n  metrics     m.jsonl"


def test_what_was_measured_is_beside_what_was_planned(calls):
    assert main([*TRAIN, "--layout", "fsdp", "--mesh", "fsdp=8", "--chips", "h100:8", "--json"]) == 0
    ((run, plan),) = calls
    assert plan.step is not None
    planned_s, planned_bytes = plan.step.seconds, plan.memory.total_bytes_per_device
    outcome = RunOutcome(
        ended="finished",
        step=20,
        loss=None,
        checkpoint=None,
        metrics=Path("m.jsonl"),
        step_s=planned_s * 1.25,
        measured_bytes=planned_bytes // 2,
    )
    _, _, time, memory = ended(outcome, run, plan).split("\n")
    assert time.startswith("  a step      ")
    assert time.endswith(f", planned {pretty_seconds(planned_s)}: +25%")
    assert memory.startswith("  a device    ")
    assert memory.endswith(f", planned {pretty_bytes(planned_bytes)}: -50%")
    data = outcome.to_json()
    assert (data["step_s"], data["measured_bytes"]) == (planned_s * 1.25, planned_bytes // 2)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_error_in_the_plan_stops_the_run(options, calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--mesh", "fsdp=8", "--batch", "6", *options]) == 1
    assert calls == []
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert "SW108" in out
    if options:
        assert [finding["code"] for finding in json.loads(out)["findings"]] == ["SW108"]
    else:
        assert err == "shardwright: the plan has errors, so nothing was started.\n"


BOUNDS = {
    "--steps": "0",
    "--stop-after": "21",
    "--lr": "0",
    "--warmup": "21",
    "--weight-decay": "-1",
    "--clip": "nan",
    "--seed": "-1",
    "--checkpoint-every": "0",
    "--keep": "0",
    "--resume-from": "0",
}
SAID = {
    "--steps": "--steps is 0, and must be at least 1.",
    "--stop-after": "--stop-after is 21, and must not be above --steps, which is 20. For a longer run, give a larger --steps.",
    "--lr": "--lr is 0, and must be a number above 0.",
    "--warmup": "--warmup is 21, and must be from 0 to --steps, which is 20: "
    "the learning rate rises for --warmup steps and falls for the rest.",
    "--weight-decay": "--weight-decay is -1, and must be a number of at least 0.",
    "--clip": "--clip is nan, and must be a number above 0.",
    "--seed": "--seed is -1, and must be from 0 to 2^63 - 1.",
    "--checkpoint-every": "--checkpoint-every is 0, and must be at least 1.",
    "--keep": "--keep is 0, and must be at least 1.",
    "--resume-from": "--resume-from is 0, and must be at least 1.",
}


@pytest.mark.parametrize("option", BOUNDS)
def test_an_invalid_number(option, calls, capsys):
    assert main(once([*TRAIN, option, BOUNDS[option]])) == 2
    assert capsys.readouterr() == ("", f"shardwright: {SAID[option]}\n")
    assert calls == []


def test_without_jax_the_extra_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("shardwright.engine_jax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    assert main([*TRAIN, "--json"]) == 2
    assert capsys.readouterr().err == (
        "shardwright: training on JAX needs the package 'jax', which is not installed. Install it with: "
        "pip install 'shardwright[jax]'\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"XLA_FLAGS": f"{FLAG}=8"}),
        ({"XLA_FLAGS": "--xla_dump_to=/tmp"}, {"XLA_FLAGS": f"--xla_dump_to=/tmp {FLAG}=8"}),
        ({"XLA_FLAGS": f"{FLAG}=2 --a=b"}, {"XLA_FLAGS": f"--a=b {FLAG}=8"}),
        ({"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAG}=8"}),
        ({"JAX_PLATFORMS": "cuda,cpu"}, {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": f"{FLAG}=8"}),
        ({"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--a=b"}, {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--a=b"}),
    ],
)
def test_devices_are_simulated_by_a_flag_after_those_of_the_user(before, after):
    simulate_devices(8, before, jax_is_loaded=False)
    assert before == after


def test_nothing_is_simulated_without_a_number_or_after_jax_has_started():
    environment = {"XLA_FLAGS": "--a=b"}
    simulate_devices(None, environment, jax_is_loaded=False)
    simulate_devices(8, environment, jax_is_loaded=True)
    assert environment == {"XLA_FLAGS": "--a=b"}


@pytest.mark.parametrize(
    ("before", "device", "after"),
    [
        ({}, "null", {"JAX_PLATFORMS": "cpu"}),
        ({"JAX_PLATFORMS": ""}, "null", {"JAX_PLATFORMS": "cpu"}),
        ({"JAX_PLATFORMS": "tpu,cpu"}, "null", {"JAX_PLATFORMS": "tpu,cpu"}),
        ({"TPU_LIBRARY_PATH": "a"}, "null", {"TPU_LIBRARY_PATH": "a"}),
        ({}, "accel0", {}),
        ({}, "vfio/0", {}),
        ({}, "nvidia0", {}),
    ],
)
def test_libtpu_is_not_started_where_no_accelerator_is(before, device, after, tmp_path, monkeypatch):
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    monkeypatch.setattr(devices, "find_spec", {}.get)
    environment = dict(before)
    leave_out_absent_tpus(environment, jax_is_loaded=False, dev=tmp_path)
    assert environment == before
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    leave_out_absent_tpus(environment, jax_is_loaded=True, dev=tmp_path)
    assert environment == before
    leave_out_absent_tpus(environment, jax_is_loaded=False, dev=tmp_path)
    assert environment == after


def test_options_made_in_a_program_are_checked_too():
    with pytest.raises(InputError, match=r"^--devices is 0, and must be at least 1\.$"):
        RunOptions(steps=1, out=Path("a"), devices=0)
