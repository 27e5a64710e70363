"""The answer of a plan with chips: by arithmetic on the model's published sizes, and the same from every verb that says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.core.estimate.answer import Training
from shardwright.report.plan.answer_view import training_text
from shardwright.report.review.answers_view import faster

EMBED, LAYERS, HEADS, KV_HEADS, WIDTH, MLP, VOCAB = 8192, 80, 64, 8, 128, 28672, 128256
"""Llama 3 70B, as published."""

H100_PEAK = 989.4e12
"""Dense bfloat16 products of an H100 SXM in a second, by its data sheet."""

OPTIONS = "--layout fsdp --mesh fsdp=256 --chips h100:32x8 --batch 256 --length 8192"


def said(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    main([*line.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_figures_follow_from_the_step_and_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = said(capsys, f"plan llama3-70b {OPTIONS} --tokens 15T --price 2.5")
    answer, seconds, devices = plan["answer"], plan["step"]["seconds"], 256
    tokens = 256 * 8192
    multiplied = LAYERS * (2 * EMBED * HEADS * WIDTH + 2 * EMBED * KV_HEADS * WIDTH + 3 * EMBED * MLP) + VOCAB * EMBED
    flops = (6 * multiplied + 12 * LAYERS * HEADS * WIDTH * 8192) * tokens
    assert answer["step_s"] == seconds
    assert answer["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert answer["tokens_per_s_per_device"] == pytest.approx(tokens / seconds / devices)
    assert answer["model_tflops_per_s_per_device"] == pytest.approx(flops / seconds / devices / 1e12)
    assert answer["mfu"] == pytest.approx(flops / seconds / devices / H100_PEAK, rel=1e-3)
    # All layers are computed once more: a third of their FLOPs, but for what nothing in the backward pass reads.
    assert 1.2 < answer["hardware_tflops_per_s_per_device"] / answer["model_tflops_per_s_per_device"] < 4 / 3
    assert answer["exposed_share"] == pytest.approx(plan["step"]["exposed_seconds"] / seconds)
    assert answer["waiting"]["network"] == "between nodes"
    training = answer["training"]
    assert training["days"] == pytest.approx(15e12 / tokens * seconds / 86400)
    assert training["device_hours"] == pytest.approx(training["days"] * 24 * devices)
    assert training["cost"] == pytest.approx(training["device_hours"] * 2.5)


def test_more_than_the_memory_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama3-405b --layout fsdp --mesh fsdp=8 --chips h100:1x8 --batch 8 --length 8192"
    plan = said(capsys, line)
    assert plan["answer"]["fits"] is False
    assert {"SW312"} <= {finding["code"] for finding in plan["findings"]}
    main(line.split())
    assert "  memory    does not fit: " in capsys.readouterr().out


def test_without_chips_or_links_nothing_is_said_about_time(capsys: pytest.CaptureFixture[str]) -> None:
    for chips in ("", " --chips cpu:8"):
        line = f"plan llama3-test --layout fsdp --mesh fsdp=8{chips}"
        assert said(capsys, line)["answer"] is None
        main(line.split())
        assert "a device; with --chips also whether it fits" in capsys.readouterr().out


def test_every_verb_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = f"{OPTIONS} --tokens 1T"
    answer = said(capsys, f"plan llama3-70b {options}")["answer"]
    both = said(
        capsys,
        f"diff fsdp hsdp:data=2,fsdp=128 --model llama3-70b {OPTIONS.partition('--chips')[1]}{OPTIONS.partition('--chips')[2]} --tokens 1T",
    )
    assert both["answer"]["before"] == answer
    path = tmp_path / "a.lock.json"
    lock = said(capsys, f"lock llama3-70b {options} --out {path}")["lock"]
    assert lock["answer"]["step_s"] == pytest.approx(answer["step_s"], rel=1e-3)
    assert lock["request"]["tokens"] == 10**12
    (checked,) = said(capsys, f"check {path}")["checked"]
    assert checked["difference"]["answer"]["before"]["training"]["days"] == pytest.approx(
        answer["training"]["days"], rel=1e-3
    )
    # Another speed of the chips moves nothing.
    held = json.loads(path.read_text())
    held["answer"]["step_s"] *= 2
    path.write_text(json.dumps(held))
    assert main(["check", str(path)]) == 0


def test_a_lock_whose_answer_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.lock.json"
    main(["lock", "llama3-8b", "--layout", "fsdp", "--chips", "h100:1x8", "--batch", "8", "--out", str(path)])
    held = json.loads(path.read_text())
    for name, value in (("step_s", "fast"), ("training", {"tokens": 1}), ("needed_bytes", None)):
        path.write_text(json.dumps({**held, "answer": {**held["answer"], name: value}}))
        assert main(["check", str(path)]) == 2, name
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens 15T", "--tokens needs --chips"),
        ("--tokens 0 --chips h100:1x8", "--tokens is 0"),
        ("--price 2 --chips h100:1x8", "--price is that of a device for an hour of a training, so it needs --tokens"),
        ("--tokens 1T --price -2 --chips h100:1x8", "--price is -2, and must be above 0 and at most 1,000,000"),
        ("--tokens 1T --price nan --chips h100:1x8", "--price is nan, and must be above 0 and at most 1,000,000"),
        ("--tokens 15X --chips h100:1x8", "'15X' is not a number of tokens"),
        ("--tokens 0.5 --chips h100:1x8", "'0.5' is not a number of tokens"),
        ("--show weights,weigths", "--show: 'weigths' is no section of a plan"),
        ("--show weights --full", "--full shows every section"),
        ("--full --json", "--full chooses what people see"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    assert main(["plan", "llama3-test", *options.split()]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())


def test_sections_are_those_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "llama3-test", "--layout", "fsdp", "--mesh", "fsdp=8"]
    main([*line, "--show", "collectives"])
    some = capsys.readouterr().out
    assert "collectives of one step" in some
    assert "weights, per layer" not in some
    main([*line, "--full"])
    full = capsys.readouterr().out
    assert "weights, per layer" in full
    assert "Not shown" not in full


def test_equal_plans_are_called_equal() -> None:
    assert faster([{"tokens_per_s": 1000.0}, {"tokens_per_s": 1004.0}], ["A", "B"]) == "A and B are equally fast."
    assert faster([None, {"tokens_per_s": 1.0}], ["A", "B"]) == ""


def test_a_short_training_has_its_hours() -> None:
    text = training_text(Training(tokens=10**9, days=0.0123, device_hours=2.4, price=None))
    assert text == "0.0123 days, 2.4 device-hours"


def test_a_training_whose_step_has_no_time_has_no_days(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "llama3-8b", "--layout", "fsdp", "--chips", "mi325x:64", "--batch", "64", "--tokens", "15T"])
    assert "  15T tokens  no days: a step has no time" in capsys.readouterr().out


def test_what_stages_wait_is_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama3-8b --layout pp --mesh stage=4 --chips h100:64 --batch 64 --microbatches 4"
    step = said(capsys, line)["step"]
    main(line.split())
    shown = f"{step['idle_seconds'] / step['seconds']:.3g}".removeprefix("0.")
    assert f"waiting   {shown[:2]}." in capsys.readouterr().out


def test_a_lock_and_its_plan_show_the_same_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = f"{OPTIONS} --tokens 15T --price 2"
    main(["lock", "llama3-70b", *options.split(), "--out", str(tmp_path / "a.lock.json")])
    capsys.readouterr()
    main(["diff", str(tmp_path / "a.lock.json"), "fsdp"])
    lines = capsys.readouterr().out.split("on its chips")[1].splitlines()[2:11]
    assert all(line.split()[-1] == line.split()[-2] or "GiB" in line or " s" in line for line in lines), lines
    assert lines[-1].split()[0] == "cost"


def test_a_cost_is_the_price_times_the_hours_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            *[
                "plan",
                "llama3-8b",
                "--layout",
                "fsdp",
                "--chips",
                "h100:8",
                "--batch",
                "8",
                "--tokens",
                "100M",
                "--price",
                "2",
            ]
        ]
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "device-hours" in line)
    hours, cost = (float(line.split(word)[0].split()[-1].replace(",", "")) for word in (" device-hours", " at 2"))
    assert cost == pytest.approx(2 * hours, rel=1e-3)
    assert main(["plan", "llama3-8b", "--chips", "h100:8", "--tokens", "1T", "--price", "1e308"]) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--layout fsdp --mesh fsdp=16 --chips mi325x:2x8 --batch 16", "no source was checked for a number of this chip (SW207)"),
        ("--layout fsdp --mesh fsdp=16 --chips h100:2x8 --batch 8", "devices have no row, or no token (SW108)"),
    ],
)  # fmt: skip
def test_why_a_step_has_no_time(capsys: pytest.CaptureFixture[str], options: str, why: str) -> None:
    main(["plan", "llama3-test", *options.split()])
    assert f"  step      no time: {why}\n" in capsys.readouterr().out
