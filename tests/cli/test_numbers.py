"""Every option that takes a number, with extreme numbers: accepted, or refused with a message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.arguments.declared import ValueType, declaration
from shardwright.cli.main import main
from shardwright.cli.running.train import run_options
from shardwright.cli.typed.options import PlanOptions, TrainOptions
from shardwright.cli.typed.request import planned, typed_request
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.training.cluster import CommandLine, find_processes

HOSTILE = (
    *(
        "0",
        "-1",
        "-0",
        "1",
        "3",
        "2147483647",
        "2147483648",
        "30000000000",
        "9223372036854775808",
        "-9223372036854775809",
    ),
    *("9" * 5000, "-" + "9" * 5000, "nan", "-nan", "inf", "-inf", "1e308", "1e309", "5e-324", "1e-400", "0.1", "1e3"),
    *("", " ", " 7 ", "1_0", "٣", "0x10", "1,2", "true", "none", "½", "--", "\x00"),
)


def number_options(verb: type) -> Mapping[str, ValueType]:
    """How each option of a verb that takes a number is read, as its dataclasses declare it."""
    options = declaration(verb).options
    return {option.field: option.value for option in options if option.value and option.value.metavar in ("N", "F")}


OPTIONS = number_options(TrainVerb)


def test_the_options_are_found() -> None:
    assert {
        "devices",
        "batch",
        "length",
        "microbatches",
        "loss_chunks",
        "expert_buffer",
        "average",
        "tokens",
        "price",
    } == set(number_options(PlanOptions))
    assert {"steps", "lr", "seed", "join_timeout", "keep", "clip", *number_options(PlanOptions)} < set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_number_is_taken_or_refused(option) -> None:
    """What `train` makes of the options before it starts anything."""
    for value in HOSTILE:
        try:
            number = OPTIONS[option].read(value)
        except ValueError as why:
            refused = str(why)
            kinds = ("a whole number.", "a number.", "a number of tokens, as 300B or 15T.")
            assert refused in {f"'{value}' is not {kind}" for kind in kinds}, value
            continue
        try:
            started(option, number)
        except InputError as error:
            refused = str(error)
            assert 20 < len(refused) < 400, value
        except FindingsError as error:
            codes = {finding.code for finding in error.findings}
            assert codes == {"SW106"}, value


def started(option: str, number: float) -> None:
    planning = option in number_options(PlanOptions)
    given = {"batch": 8, "length": 32, "set": (("num_layers=1", "embed=64", "mlp=128"),)}
    plan = PlanOptions(**{**given, option: number} if planning else given)  # pyright: ignore[reportArgumentType]
    run: dict[str, Any] = {"steps": 4, "out": Path("out"), **({} if planning else {option: number})}
    options = TrainOptions(**run)
    command_line = CommandLine(count=options.processes, index=options.process, join_timeout_s=options.join_timeout)
    find_processes(command_line, {}, lambda: "here")
    run_options(options, devices=plan.devices)
    question = typed_request("mixtral-test", "fsdp", plan)
    if planning:
        planned(question)


def test_on_the_command_line(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "llama3-test", "--steps", "30000000000", "--out", "out"]) == 2
    assert capsys.readouterr().err == (
        "shardwright: --steps is 30,000,000,000, and must be at most 1,000,000,000. Give fewer steps.\n"
    )
    assert main(["plan", "llama3-8b", "--layout", "cp", "--devices", "9" * 5000]) == 2
    assert capsys.readouterr().err == (
        "shardwright: --devices is above 10^20, and must be at most 1,048,576. Give fewer devices.\n"
    )
    assert main(["plan", "llama3-8b", "--layout", "cp", "--mesh", f"context={10**12}"]) == 2
    assert capsys.readouterr().err == (
        "shardwright: the size of mesh axis 'context' is 1,000,000,000,000, and must be at most 1,048,576. "
        "Give fewer devices.\n"
    )
    assert list(tmp_path.iterdir()) == []
