"""`shardwright compile` for simulated devices: what is printed, what is kept, and what a user can get wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import pytest

from shardwright.cli.main import main
from shardwright.cli.running.compile import WITHOUT_HARDWARE, without_hardware
from shardwright.engine_jax.compile import built_cache, target

SIZES = ["--length", "16", "--dtype", "float32", "--set", "num_layers=2", "embed=32", "mlp=64", "vocab=64"]
SMALL = ["--batch", "8", *SIZES]
MESH = ["--layout", "ep", "--mesh", "fsdp=2,expert=4", "--chips", "cpu:8"]
DENSE = {"model": "llama3-test", "mesh": ["--layout", "fsdp", "--mesh", "fsdp=8", "--chips", "cpu:8"]}
"""A model that compiles in a fifth of the time."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    assert len(jax.devices()) == 8
    return tmp_path / "cache"


def compiled(capsys, *options: str, model: str = "mixtral-test", mesh: list[str] = MESH) -> dict:
    sizes = SIZES if "--batch" in options else SMALL
    assert main(["compile", model, *mesh, *sizes, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def collectives(report: dict, kind: str, axis: str, component: str) -> list[dict]:
    return [
        one
        for one in report["compiled"]["collectives"]
        if one["kind"] == kind and axis in one["axes"] and one["component"] == component
    ]


def of_weights(rows: list[dict]) -> list[str]:
    return sorted({name for row in rows for name in row["tensors"] if ".moe." in name})


def test_the_choice_of_movement_is_in_the_program(capsys) -> None:
    tokens = compiled(capsys, "--move", "moe=all-to-all")
    assert collectives(tokens, "all-to-all", "expert", "moe")
    assert not of_weights(collectives(tokens, "all-gather", "expert", "moe"))
    weights = compiled(capsys, "--move", "moe=weights")
    assert not collectives(weights, "all-to-all", "expert", "moe")
    assert of_weights(collectives(weights, "all-gather", "expert", "moe")) == [
        "layers.moe.down",
        "layers.moe.gate",
        "layers.moe.up",
    ]


def test_the_contract(capsys) -> None:
    report = compiled(capsys)
    assert report["target"] == "cpu:8"
    assert set(report["agreement"]) >= {
        "collectives_matched",
        "collectives_explained",
        "collectives_unmatched",
        "bytes_error",
        "memory_error",
    }
    assert report["agreement"]["collectives_unmatched"] == 0
    memory = report["compiled"]["memory"]
    assert set(memory) >= {"arguments_bytes", "temporaries_bytes", "output_bytes", "aliased_bytes", "peak_bytes"}
    # The state is donated: all of it but the batch goes in and comes out in the same place.
    assert 0 < memory["output_bytes"] - memory["aliased_bytes"] < 1024
    gathers = collectives(report, "all-gather", "fsdp", "attention")
    assert {one["phase"] for one in gathers} == {"forward", "recompute"}
    assert all(one["source"].endswith(".py") or ".py:" in one["source"] for one in gathers)
    assert {one["count_per_step"] for one in gathers} == {2}
    assert all(row in report for row in ("model", "tensors", "collectives", "findings"))


def test_what_is_printed(capsys) -> None:
    assert main(["compile", "llama3-test", "--layout", "fsdp", "--mesh", "fsdp=8", "--chips", "cpu:8", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "compiled for cpu:8" in out
    assert err.splitlines() == [
        "lowering llama3-test for cpu:8 ...",
        "compiling llama3-test for cpu:8 ...",
        "reading the program ...",
    ]


def test_the_second_time_is_from_the_cache(capsys, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(capsys, **DENSE)
    (entry,) = (own_cache / "compiled").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("shardwright.engine_jax.compile.compiling.build", lambda *_: pytest.fail("compiled again"))
        assert compiled(capsys, **DENSE) == first
    entry.write_bytes(gzip.compress(b'["truncated'))
    assert compiled(capsys, **DENSE)["compiled"]["collectives"] == first["compiled"]["collectives"]
    assert [path.name for path in (own_cache / "compiled").iterdir()] == [entry.name]
    # Another number of microbatches is another program.
    compiled(capsys, "--microbatches", "2", "--batch", "16", **DENSE)
    assert len(list((own_cache / "compiled").iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(own_cache: Path) -> None:
    own_cache.write_text("no folder")
    assert built_cache.default_folder() == own_cache / "compiled"
    built_cache._write(own_cache / "compiled" / "a.json.gz", None)  # type: ignore[arg-type]
    assert own_cache.read_text() == "no folder"
    assert built_cache.default_folder({"SHARDWRIGHT_CACHE": ""}) is None
    assert built_cache.default_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/shardwright/compiled")


def test_the_text_can_be_kept(capsys, tmp_path: Path) -> None:
    compiled(capsys, "--hlo", "step.txt", **DENSE)
    assert (tmp_path / "step.txt").read_text().startswith("HloModule")
    assert main(["compile", "mixtral-test", *MESH, *SMALL, "--hlo", "nowhere/step.txt"]) == 2
    # Said before anything is compiled.
    assert capsys.readouterr().err == "shardwright: --hlo: cannot write nowhere/step.txt: there is no folder nowhere.\n"


REFUSED = {
    "no target": (
        [],
        "shardwright: compile needs a target: --chips v5p:4x4x4, h100:8x8, or cpu:8 for simulated devices.\n",
    ),
    "an unknown chip": (
        ["--chips", "v5q:2x2x2"],
        "shardwright: --chips: no chip is called 'v5q'. Did you mean 'v5p'?\n",
    ),
    "PyTorch": (
        ["--engine", "torch", "--hlo", "step.txt"],
        "shardwright: --hlo: PyTorch compiles no program, so there is no text. Leave --hlo out, or use --engine jax.\n",
    ),
    "no compiler for options": (
        ["--engine", "torch", "--xla", "xla_a=true"],
        "shardwright: --xla: a dry run of PyTorch has no compiler. Leave --xla out, or give --engine jax.\n",
    ),
    "an option without a value": (
        ["--chips", "cpu:8", "--xla", "xla_a"],
        "shardwright: --xla: 'xla_a' has no value.\n    xla_a\n    ^^^^^\nExpected: NAME=VALUE, with spaces between, as in "
        "xla_gpu_enable_latency_hiding_scheduler=true.\n",
    ),
    "a GPU without a description": (
        ["--chips", "gb200:1x8"],
        "shardwright: --chips: the compiler has no description of GB200 NVL72. It has: h100, h200, b200.\n",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_one_message_for_an_invalid_request(wrong: str, capsys) -> None:
    options, message = REFUSED[wrong]
    assert main(["compile", "mixtral-test", "--layout", "ep", "--mesh", "fsdp=2,expert=4", *SMALL, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(message)
    assert "Traceback" not in err


def test_chips_that_are_not_the_mesh(capsys) -> None:
    assert main(["compile", "mixtral-test", *MESH[:-1], "cpu:4", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "SW106" in err
    assert "8" in err
    assert "4" in err
    assert out == ""


@pytest.mark.parametrize(
    ("chips", "package", "extra"), [("v5p:2x2x2", "libtpu", "tpu"), ("h100:1x8", "jax-cuda13-plugin", "gpu-compile")]
)
def test_what_is_not_installed_is_named(chips, package, extra, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "installed_version", lambda _: None)
    assert main(["compile", "mixtral-test", "--layout", "ep", "--mesh", "expert=8", "--chips", chips, *SMALL]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            f"needs the package '{package}', which is not installed. Install it with: pip install 'shardwright[{extra}]'"
        )
    )


def test_compilers_start_without_hardware() -> None:
    environment = {"JAX_PLATFORMS": "tpu", "TPU_LOG_DIR": "mine"}
    without_hardware(environment, jax_is_loaded=False)
    assert environment == {**WITHOUT_HARDWARE, "TPU_LOG_DIR": "mine"}
    untouched: dict[str, str] = {}
    without_hardware(untouched, jax_is_loaded=True)
    assert untouched == {}


def test_every_description_of_a_gpu_is_complete() -> None:
    texts = target.gpu_targets()
    assert set(texts) == {"h100", "h200", "b200"}
    for text in texts.values():
        assert text.count("{") == text.count("}")
        for field in ("core_count", "device_memory_size", "threads_per_warp", "cuda_compute_capability"):
            assert f"{field}" in text
