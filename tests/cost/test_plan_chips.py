"""``shardwright plan --chips``: its JSON, the values that it sets, and the inputs that it refuses."""

from __future__ import annotations

import json
import time

import pytest

from shardwright.cli.main import main

STEP = {"seconds", "compute_seconds", "communication_seconds", "exposed_seconds"}


def planned(capsys, *arguments: str) -> dict:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("chips", "num_devices"), [("v5p:2x2x2", 8), ("v5p:2x2x2*2", 16), ("h100:2x8", 16), ("tpu7x:2x2x1", 8)]
)
def test_every_collective_and_the_step_have_seconds(chips, num_devices, capsys):
    data = planned(capsys, "llama3-test", "--layout", "fsdp-tp", "--batch", "16", "--chips", chips)
    sizes = list(data["mesh"].values())
    assert sizes[0] * sizes[1] * (sizes[2] if len(sizes) > 2 else 1) == num_devices
    assert data["collectives"]
    assert all(one["seconds"] > 0 for one in data["collectives"])
    step = data["step"]
    assert set(step) >= STEP
    assert step["seconds"] >= max(step["compute_seconds"], step["exposed_seconds"])
    assert step["exposed_seconds"] <= step["communication_seconds"]
    assert step["low_seconds"] <= step["seconds"] <= step["high_seconds"]


def test_without_chips_and_on_simulated_devices_there_is_no_time(capsys):
    for arguments in ((), ("--chips", "cpu:8")):
        data = planned(capsys, "llama3-test", *arguments)
        assert data["step"] is None
        assert {one["seconds"] for one in data["collectives"]} == {None}


def test_choices_have_costs_in_seconds(capsys):
    arguments = ("mixtral-test", "--layout", "ep", "--move", "moe=auto", "--batch", "16")
    timed, hops = planned(capsys, *arguments, "--chips", "v5p:2x2x2")["choices"]
    assert (hops["what"], hops["costs"].keys()) == ("hops", hops["wire_bytes"].keys())
    assert set(timed["costs"]) == {"all-to-all", "ring", "weights"}
    assert timed["costs"][timed["chosen"]] == min(timed["costs"].values())
    (untimed,) = planned(capsys, *arguments, "--devices", "8")["choices"]
    assert untimed["costs"] == {}


def test_memory_is_compared_with_the_chip(capsys):
    data = planned(capsys, "llama3-70b", "--layout", "fsdp", "--chips", "v5e:2x4", "--batch", "8")
    (found,) = [finding for finding in data["findings"] if finding["code"] == "SW312"]
    assert found["severity"] == "error"
    assert "TPU v5e" in found["found"]
    assert "libtpu 0.0.42.1" in found["needed"]


@pytest.mark.parametrize("chips", ["v5x:4x4", "v5e:4x4x4", "h100:2x2x2", "h100", "v5p:64x64x64"])
def test_a_refusal_is_one_message(chips, capsys):
    assert main(["plan", "llama3-test", "--chips", chips]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardwright: --chips: ")
    assert err.count("\n") == 1


def test_a_large_model_on_many_chips_is_priced_in_a_moment(capsys):
    planned(capsys, "deepseek3-671b", "--layout", "ep-as-cp", "--chips", "v5p:8x8x8", "--batch", "128")
    start = time.perf_counter()
    planned(capsys, "deepseek3-671b", "--layout", "ep-as-cp", "--chips", "v5p:8x8x8", "--batch", "128")
    assert time.perf_counter() - start < 5
