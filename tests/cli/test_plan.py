"""`shardwright plan --json` is the plan's own JSON: the contract that other programs read."""

from __future__ import annotations

import json

from shardwright.cli.main import main
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.planning import make_plan

PLAN = {
    "model",
    "layout",
    "mesh",
    "engine",
    "batch",
    "length",
    "groups",
    "tensors",
    "collectives",
    "memory",
    "step",
    "choices",
    "findings",
}
TENSOR = {
    "name",
    "kind",
    "component",
    "shape",
    "dtype",
    "in_use",
    "bytes_per_device",
    "num",
    "shard_group",
    "replica_group",
}
COLLECTIVE = {"component", "phase", "kind", "axes", "bytes_per_device", "count_per_step", "seconds"}
MEMORY = {"weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes_per_device"}
FINDING = {"code", "severity", "law", "where", "found", "needed", "fix", "cost"}
PHASES = {"forward", "backward", "recompute", "update"}
KINDS = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "send-recv"}


def planned(capsys, *arguments: str) -> dict:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_json_is_the_plan(capsys):
    plan = make_plan(typed_request("deepseek3-test", "ep", PlanOptions(json=True)).request)
    assert planned(capsys, "deepseek3-test", "--layout", "ep") == json.loads(json.dumps(plan.to_json()))


def test_json_has_every_field_of_the_contract(capsys):
    data = planned(capsys, "deepseek3-test", "--layout", "ep", "--move", "moe=auto")
    assert set(data) >= PLAN
    assert data["mesh"] == {"data": 1, "fsdp": 2, "expert": 4}
    assert data["groups"] == {"dp": ["data", "fsdp", "expert"], "cp": [], "loss": ["data", "fsdp", "expert"]}
    assert data["step"] is None
    assert set(data["memory"]) >= MEMORY
    (choice,) = data["choices"]
    assert choice["what"] == "move.moe"
    assert set(choice) >= {"what", "chosen", "costs"}
    for row in data["tensors"]:
        weight = row["kind"] == "weight"
        assert set(row) >= TENSOR | ({"at_rest", "gradient"} if weight else set())
        assert ("at_rest" in row) == weight
        assert row["kind"] in ("weight", "activation")
        if weight:
            assert set(row["gradient"].values()) <= {"reduce-scatter", "all-reduce"}
    for row in data["collectives"]:
        assert set(row) >= COLLECTIVE
        assert row["phase"] in PHASES
        assert row["kind"] in KINDS
    for finding in data["findings"]:
        assert set(finding) >= FINDING


def test_the_head_shows_the_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "llama3-test", "--batch", "16"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  by default")]
    assert line.split(maxsplit=2)[2] == (
        "--layout fsdp --mesh fsdp=8 --length 128 --engine jax --dtype float32 --weights-dtype float32 "
        "--moments-dtype float32 --remat full --microbatches 1"
    )


def test_the_torch_engine_is_planned_for(capsys):
    data = planned(capsys, "llama3-test", "--engine", "torch")
    weight = next(row for row in data["tensors"] if row["name"] == "layers.attention.q")
    # PyTorch stores heads and head_dim as one dim, the outputs first.
    assert (weight["at_rest"], weight["shape"]) == ("heads/fsdp embed", [256, 256])


def test_what_was_chosen_is_said_once(capsys):
    assert main(["plan", "llama3-8b", "--chips", "h100:1x8"]) == 0
    head = capsys.readouterr().out.partition("\nroles\n")[0]
    chosen, _, by_default = head.partition("\n  chosen ")[2].partition("\n  by default ")
    said = chosen.partition("; next ")[0].split() + by_default.split()
    options = [word for word in said if word.startswith("--")]
    assert {"--layout", "--mesh", "--batch", "--length"} <= set(options)
    assert len(options) == len(set(options))
