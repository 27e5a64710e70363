"""A compiler that refuses a program, or makes one that cannot be printed: a finding and the plan, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwright.cli.main import main
from shardwright.cli.running import compile as compile_verb
from shardwright.compiled.reading.program import Tool
from shardwright.engine_jax.compile import compiling

TOO_LARGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.00G) exceeds "
    "available HBM (95.74G)."
)
UNREADABLE = "INTERNAL: RET_CHECK failure: async-update instruction should have 1 operands but sees 2"
COMMAND = ["compile", "llama3-test", "--layout", "fsdp", "--chips", "v5p:2x2x2", "--batch", "8"]


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lowered; what the compiler does is each test's to say."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(compiling, "lower_step", lambda *_: None)
    monkeypatch.setattr("shardwright.engine_jax.compile.built_cache.cached", lambda *given: given[2]())


def fails_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise error

    monkeypatch.setattr(compiling, "build", build)


class Refusing:
    """A lowered program that its compiler refuses."""

    def compile(self, **_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: during context [post-optimization]: no such layout\nmore")


def test_any_error_under_options_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "lower_step", lambda *_: Refusing())
    assert main([*COMMAND, "--xla", "xla_tpu_a=true"]) == 2
    refused = (
        "the compiler of v5p:2x2x2 refuses its options: INTERNAL: during context [post-optimization]: no such layout"
    )
    assert capsys.readouterr().err.endswith(f"shardwright: --xla: {refused}\n")
    # Without options it is a bug of the compiler or of ours, and keeps its traceback.
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(COMMAND)


def test_what_does_not_fit_is_a_finding_with_the_prediction(capsys, monkeypatch):
    fails_with(compiling.DoesNotFitError(TOO_LARGE), monkeypatch)
    assert main(COMMAND) == 1
    shown = capsys.readouterr().out
    assert "activations, estimated" in shown
    assert "error SW312: What a device must hold fits in what the chip lets a program use." in shown
    assert "192 GiB at its peak, 201% of what a TPU v5p lets a program use" in shown


def test_what_does_not_fit_is_in_the_json(capsys, monkeypatch):
    fails_with(compiling.DoesNotFitError(TOO_LARGE), monkeypatch)
    assert main([*COMMAND, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["compiled"] is None
    assert report["memory"]["weights_bytes"] > 0
    assert "SW312" in {finding["code"] for finding in report["findings"]}


def test_a_program_of_a_newer_compiler_names_the_version(capsys, monkeypatch):
    fails_with(compiling.CannotBePrintedError(UNREADABLE), monkeypatch)
    newer = Tool(name="libtpu", version="0.0.51", wanted="0.0.42.*")
    monkeypatch.setattr(compile_verb, "pinned_tools", lambda: (newer,))
    assert main(COMMAND) == 1
    shown = capsys.readouterr().out
    assert "error SW313: A program is compiled by the version that JAX requires." in shown
    assert "fix    pip install 'libtpu==0.0.42.*'" in shown


def test_one_that_the_right_compiler_cannot_print_is_one_line(capsys, monkeypatch):
    fails_with(compiling.CannotBePrintedError(UNREADABLE), monkeypatch)
    monkeypatch.setattr(compile_verb, "pinned_tools", lambda: ())
    assert main(COMMAND) == 2
    assert f"the program that was compiled for v5p:2x2x2 cannot be printed: {UNREADABLE}" in capsys.readouterr().err
