"""`shardwright compile --engine torch`: no chips, the same table and the same JSON, and what a user can get wrong."""

from __future__ import annotations

import json

import pytest

from shardwright.cli.main import main
from shardwright.cli.running.compile_torch import EVEN

SMALL = ["--batch", "16", "--length", "16", "--set", "num_layers=2"]
EXPERTS = ["mixtral-test", "--layout", "ep", "--mesh", "fsdp=4,expert=4", "--engine", "torch", *SMALL]


def compiled(capsys, *arguments: str) -> dict:
    assert main(["compile", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_contract(capsys) -> None:
    report = compiled(capsys, *EXPERTS)
    assert (report["target"], report["engine"], report["step"]) == ("torch:fake x 16", "torch", None)
    assert report["compiled"]["said"] == [EVEN]
    agreement = report["agreement"]
    assert agreement["collectives_unmatched"] == 0
    assert agreement["bytes_error"] == 0
    assert agreement["collectives_matched"] > agreement["collectives_explained"]
    memory, planned = report["compiled"]["memory"], report["memory"]
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert memory[name] == planned[name]
    assert memory["peak_bytes"] == memory["activations_bytes"] + sum(
        memory[name] for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    )
    assert agreement["memory_error"] == pytest.approx(planned["total_bytes_per_device"] / memory["peak_bytes"] - 1)
    for one in report["compiled"]["collectives"]:
        assert one["source"].startswith("engine_torch/")
        assert one["group_size"] in (4, 16)


def test_what_is_printed(capsys) -> None:
    assert main(["compile", *EXPERTS]) == 0
    out, err = capsys.readouterr()
    assert "dry run as torch:fake x 16 in" in out
    assert EVEN in " ".join(out.split())
    assert "counts of rows" in out
    assert "unmatched" not in out
    assert err == "dry run of a step of mixtral-test as one of 16 ranks ...\n"


def test_a_model_without_experts_assumes_nothing(capsys) -> None:
    report = compiled(capsys, "llama3-test", "--mesh", "fsdp=16", "--layout", "fsdp", "--engine", "torch", *SMALL)
    assert report["compiled"]["said"] == []


def test_chips_price_the_plan_and_bound_its_memory(capsys) -> None:
    options = ["--layout", "fsdp", "--engine", "torch", "--chips", "h100:2x8", *SMALL]
    report = compiled(capsys, "llama3-test", *options)
    assert report["target"] == "torch:fake x 16"
    assert report["step"]["seconds"] > 0


REFUSED = {
    "a text of a program": (
        ["--layout", "fsdp", "--mesh", "fsdp=16", "--hlo", "step.txt"],
        "shardwright: --hlo: PyTorch compiles no program, so there is no text. Leave --hlo out, or use --engine jax.\n",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_one_message_for_an_invalid_request(wrong: str, capsys) -> None:
    options, message = REFUSED[wrong]
    assert main(["compile", "llama3-test", "--engine", "torch", *options, *SMALL]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", message)


def test_a_layout_that_the_engine_does_not_lower_is_refused(capsys) -> None:
    stages = ["--layout", "pp", "--mesh", "stage=2", "--microbatches", "2", "--schedule", "circular"]
    assert main(["compile", "llama3-test", "--engine", "torch", *stages, *SMALL]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error SW415: ")
    assert "axis 'stage' of layout 'pp'" in err


def test_what_is_on_the_host_stands_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", "llama3-test", "--engine", "torch", "--layout", "fsdp", "--mesh", "fsdp=4", "--batch", "8"]
    command += ["--length", "64", "--remat", "host=mlp.gate"]
    assert main(command) == 0
    # 6 layers of 2 rows of 64 tokens and 768 units in float32.
    assert "In the host's memory: 2.25 MiB, planned 2.25 MiB." in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["compiled"]["memory"]["host_bytes"] == read["memory"]["host_bytes"] == 6 * 2 * 64 * 768 * 4
