"""Real models compiled for chips that this machine does not have, compared with their plans. `make test-targets` runs these.

The compilers run in a separate process, which starts JAX as the command line does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.targets.cases import CASES, Case

pytestmark = pytest.mark.targets

ROOT = Path(__file__).parent.parent.parent
MIXTRAL = "mixtral-8x7b ep expert8 {} moe-{} capacity_factor-1.25"
WITHIN = 0.10
"""The relative error that is allowed for the memory at the peak."""


def case(name: str) -> Case:
    (found,) = (case for case in CASES if case.name == name)
    return found


def compiled(case: Case) -> dict:
    """The output of `shardwright compile --json`."""
    options = case.options
    arguments = [case.model, "--layout", case.layout, "--mesh", case.mesh, "--chips", case.chips]
    arguments += ["--batch", str(case.batch), "--length", str(case.length), "--dtype", "bfloat16"]
    arguments += ["--weights-dtype", "bfloat16", "--moments-dtype", "bfloat16"]
    arguments += ["--move", case.move] if case.move else []
    arguments += ["--set", case.set] if case.set else []
    arguments += ["--microbatches", str(case.microbatches)] if options.microbatches else []
    arguments += ["--precision", case.precision] if case.precision else []
    return run_compile(arguments)


def run_compile(arguments: Sequence[str]) -> dict:
    command = [sys.executable, "-c", "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    output = subprocess.run(
        [*command, "compile", *arguments, "--json"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")},
        capture_output=True,
        text=True,
    )
    assert output.stdout, output.stderr
    return json.loads(output.stdout)


def of_experts(output: dict, kind: str) -> list[str]:
    return [
        name
        for one in output["compiled"]["collectives"]
        if one["kind"] == kind and "expert" in one["axes"] and one["component"] == "moe"
        for name in one["tensors"] or ["no name"]
    ]


@pytest.mark.parametrize("target", ["h100:1x8", "cpu:8", "v5p:2x2x2"])
def test_tokens_are_sent_or_weights_gathered(target: str) -> None:
    tokens = compiled(case(MIXTRAL.format(target, "all-to-all")))
    assert of_experts(tokens, "all-to-all")
    assert not [name for name in of_experts(tokens, "all-gather") if name.startswith("layers.moe.")]
    weights = compiled(case(MIXTRAL.format(target, "weights")))
    assert not of_experts(weights, "all-to-all")
    assert {name for name in of_experts(weights, "all-gather") if name.startswith("layers.moe.")} == {
        "layers.moe.gate",
        "layers.moe.up",
        "layers.moe.down",
    }


@pytest.mark.parametrize(
    "name",
    [
        "llama3-8b fsdp fsdp8 h100:1x8",
        "llama3-8b hsdp data2,fsdp4 h100:1x8",
        "llama3-8b fsdp-tp fsdp2,tensor4 b200:1x8",
        "llama3-8b cp fsdp2,context4 h100:1x8 attention-ring",
        "mixtral-8x7b ep fsdp2,expert4 h100:1x8 moe-ring capacity_factor-1.25",
        "llama3-8b fsdp fsdp8 v6e:2x4",
        "llama3-8b fsdp fsdp8 h100:1x8 fp8-current",
        "llama3-8b fsdp-tp fsdp2,tensor4 b200:1x8 mxfp8",
    ],
)
def test_a_program_agrees_with_its_prediction(name: str) -> None:
    output = compiled(case(name))
    agreement = output["agreement"]
    assert agreement["collectives_unmatched"] == 0, agreement["rows"]
    assert agreement["bytes_error"] <= 0.01
    assert agreement["explained_share"] <= 0.10
    assert abs(agreement["memory_error"]) <= WITHIN
    state = output["memory"]
    held = output["compiled"]["memory"]["arguments_bytes"]
    # The batch and a counter are the only other arguments, except for padding to the chip's tiles.
    assert 0 <= held - state["weights_bytes"] - state["optimizer_bytes"] < 0.002 * held


def test_a_single_layer_is_recomputed_as_several_are() -> None:
    arguments = ["llama3-test", "--set", "num_layers=1", "--layout", "fsdp-tp", "--mesh", "fsdp=2,tensor=4"]
    output = run_compile([*arguments, "--chips", "h100:1x8", "--batch", "8", "--length", "128"])
    rows = [row for row in output["agreement"]["rows"] if row["predicted_bytes"]]
    assert {row["state"] for row in rows} == {"matched"}, rows


@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        *((target, "fp8-current") for target in ("h100:1x8", "b200:1x8", "v5p:2x2x2", "v6e:2x4")),
        *((target, "fp8-delayed") for target in ("h100:1x8", "v5p:2x2x2")),
    ],
)
def test_weights_are_gathered_as_codes(target: str, recipe: str, tmp_path: Path) -> None:
    """In FP8, each byte as planned; and on GPUs no product of codes is one of their values."""
    (gathered := tmp_path / "gathered.yaml").write_text(f"recipe: {recipe}\ngather_quantized: true\n", encoding="utf-8")
    arguments = ["llama3-test", "--set", "num_layers=2", "--layout", "fsdp", "--mesh", "fsdp=8", "--chips", target]
    output = run_compile(
        [*arguments, "--batch", "8", "--length", "128", "--dtype", "bfloat16", "--precision", str(gathered)]
    )
    gathers = [one for one in output["compiled"]["collectives"] if one["kind"] == "all-gather"]
    of_layers = [one for one in gathers if any(name.startswith("layers.") for name in one["tensors"])]
    assert of_layers
    assert {dtype for one in of_layers for dtype in one["dtypes"]} == {"float8_e4m3fn"}
    rows = [row for row in output["agreement"]["rows"] if row["kind"] == "all-gather"]
    assert all(row["compiled_bytes"] == row["predicted_bytes"] for row in rows), rows
    assert "SW314" not in {finding["code"] for finding in output["findings"]}
