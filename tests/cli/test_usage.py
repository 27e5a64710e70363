"""A command line that is no use of its verb: one message with the place, the value, what was meant, and the help to read."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import pytest

from shardwright.cli.arguments.declared import Option, declaration
from shardwright.cli.arguments.verbs import Verb, tree
from shardwright.cli.interop.import_options import Shardwright
from shardwright.cli.main import main

ROOT = tree("shardwright", Shardwright)
VERBS = {verb.name: verb for verb in ROOT.leaves()}
PLAN = "plan llama3-test"

REFUSED = {
    "": "a verb is missing. Give one of plan, compile, diff,",
    "paln llama3-test": "argument 1 is 'paln', and no verb. Did you mean 'plan'?",
    "verify run": "argument 1 is 'verify', and no verb. Did you mean `ckpt verify`?",
    "--json plan": "argument 1 is '--json', and a verb belongs there; options stand after it.",
    "ckpt": "ckpt: a verb is missing. Give one of show, verify, reshard, import, export.",
    "ckpt import orbx x": "ckpt import: argument 3 is 'orbx', and no verb. Did you mean 'orbax'?",
    "plan": "plan: MODEL is missing.",
    "plan --set num_layers=2 llama3-test": "plan: MODEL is missing. --set took 'llama3-test'. Give MODEL before it.",
    "train": "train: MODEL, --steps N and --out DIR are missing.",
    "ckpt export dcp run": "ckpt export dcp: --out FOLDER is missing.",
    f"{PLAN} --lyout ep": "plan: argument 3 is '--lyout', and no option of this verb. Did you mean --layout NAME|FILE?",
    "ckpt show run --jsn": "ckpt show: argument 4 is '--jsn', and no option of this verb. Did you mean --json?",
    f"{PLAN} --steps 3": "plan: argument 3 is '--steps', and no option of this verb. It is one of `train`.",
    f"{PLAN} --to x": "plan: argument 3 is '--to', and no option of this verb.",
    f"{PLAN} ---json": "plan: argument 3 is '---json', and no option of this verb. Did you mean --json?",
    "--version plan": "--version stands alone, and argument 2 is 'plan'. Leave it out.",
    f"{PLAN} -chips h100:8": "plan: argument 3 is '-chips', and no option of this verb. It has two dashes: --chips.",
    f"{PLAN} -j": "plan: argument 3 is '-j', and no option of this verb.",
    f"{PLAN} --version": "plan: argument 3 is '--version', and no option of this verb. It stands alone: shardwright --version.",
    f"{PLAN} fsdp": "plan: argument 3 is 'fsdp', and this verb takes MODEL only.",
    f"{PLAN} --batch 3.5": "plan: --batch (argument 4): '3.5' is not a whole number.",
    f"{PLAN} --batch 4 --json --batch=4": "plan: --batch occurs twice: as arguments 3 and 6. Leave one out.",
    f"{PLAN} --json=true": "plan: --json (argument 3) takes no value, and has 'true'. Leave '=true' out.",
    f"{PLAN} --batch": "plan: --batch (argument 3) has no value: --batch ROWS.",
    f"{PLAN} --layout --json": "plan: --layout (argument 3) has no value: --layout NAME|FILE. A value with dashes in front is typed "
    "--layout=--json.",
    f"{PLAN} --set --json": "plan: --set (argument 3) has no value: --set NAME=VALUE ....",
    f"{PLAN} --layout=": "plan: --layout (argument 3) is empty: --layout NAME|FILE.",
    f"{PLAN} --dtype bfloat61": "plan: --dtype (argument 4): 'bfloat61' is none of float32, bfloat16. Did you mean 'bfloat16'?",
    f"{PLAN} --dtype float16": "plan: --dtype (argument 4): Nothing trains in float16: gradients below",
    f"{PLAN} --moments-dtype float16": "plan: --moments-dtype (argument 4): Nothing trains in float16",
    "train llama3-test --steps 1 --out x --lr fast": "train: --lr (argument 8): 'fast' is not a number.",
    "ckpt export dcp run --to a --out b": "ckpt export dcp: --out occurs twice: as arguments 5 and 7. Leave one out.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_command_line_says_where_and_what_is_meant(line, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    verb = err.partition(":")[2].partition(":")[0].strip()
    help_of = f"shardwright {verb} --help" if line.startswith(verb) and verb else "shardwright --help"
    assert err.startswith(f"shardwright: {REFUSED[line]}")
    assert err.splitlines()[1:] == [f"All of its options: {help_of}"]
    error = {"exit_code": 2, "message": err.removeprefix("shardwright: ").removesuffix("\n")}
    assert (json.loads(out) if out else None) == ({"error": error} if "--json" in line.split() else None)


def test_an_empty_argument_is_refused(capsys) -> None:
    assert main(["plan", ""]) == 2
    assert capsys.readouterr().err.startswith("shardwright: plan: argument 2 is empty: MODEL.\n")


def test_after_two_dashes_all_are_arguments(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--", "--json", "--help"]) == 2
    assert capsys.readouterr().err.startswith("shardwright: --json: ")


def options_of(verb: Verb) -> list[Option]:
    return [option for option in declaration(verb.of).options if not option.positional]


def damaged_lines(count: int, seed: int) -> Iterator[tuple[Verb, list[str], str]]:
    """A verb, a command line of it with one fault, and what the message must name."""
    draw = random.Random(seed)
    for _ in range(count):
        verb = draw.choice(list(VERBS.values()))
        option = draw.choice(options_of(verb))
        place = len(verb.path)
        kind = draw.choice(("misspelt", "twice", "empty", "long", "none"))
        words = [
            re.split(r"[|,]", other.metavar.strip("{}"))[0]
            for other in declaration(verb.of).options
            if other.positional
        ]
        at = place + len(words)
        if kind == "misspelt":
            letter = draw.randrange(2, len(option.name))
            wrong = option.name[:letter] + draw.choice("qzü") + option.name[letter:]
            yield verb, [*words, wrong], f"argument {at} is '{wrong}', and no option of this verb."
        elif kind == "twice" and not option.repeated:
            value = option.metavar.strip("{}").partition(",")[0] if option.metavar.startswith("{") else "1"
            typed = option.name if option.value is None else f"{option.name}={value}"
            if "DTYPE" not in option.metavar:
                yield verb, [*words, typed, typed], f"{option.name} occurs twice: as arguments {at} and {at + 1}."
        elif kind == "empty" and option.value is not None:
            yield verb, [*words, option.name, ""], f"{option.name} (argument {at + 1}) is empty: {option.typed}."
        elif kind == "long":
            yield verb, [*words, f"--{'ö' * 300}"], f"argument {at} is '--{'ö' * 300}', and no option of this verb."
        elif option.value is not None:
            yield verb, [*words, option.name], f"{option.name} (argument {at}) has no value: {option.typed}."


def test_a_drawn_fault_is_named_with_the_help_of_its_verb(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    kinds = 0
    for verb, words, message in damaged_lines(200, seed=5):
        assert main([*verb.path[1:], *words]) == 2, words
        first, last = capsys.readouterr().err.splitlines()
        assert last == f"All of its options: {verb.typed} --help", words
        assert first.startswith(f"shardwright: {verb.name}: {message}"), words
        kinds += 1
    assert kinds > 100


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["ckpt", "--help"], ["plan", "--nothing", "-h"]])
def test_help_is_no_error(words, capsys) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: shardwright ")
    assert err == ""


def test_the_version_is_a_listed_option(capsys) -> None:
    assert main(["--help"]) == 0
    assert "\n  --version   Print the version.\n" in capsys.readouterr().out


@pytest.mark.parametrize("former", [["--micro-steps", "2"], ["--micro-steps=2"], ["--micro_steps", "2"]])
def test_an_option_is_still_read_under_its_former_name(former, capsys):
    words = ["plan", "llama3-test", "--layout", "fsdp", "--devices", "8", "--batch", "16", "--json"]
    assert main([*words, *former]) == 0
    before = capsys.readouterr().out
    assert main([*words, "--microbatches", "2"]) == 0
    assert capsys.readouterr().out == before
    assert main([*words, "--microbatches", "1"]) == 0
    assert capsys.readouterr().out != before


FORMER = [
    (verb.name, name, option.name) for verb in VERBS.values() for option in options_of(verb) for name in option.former
]


def test_the_former_names() -> None:
    assert {former for former in FORMER if former[1] != "--micro-steps"} == {
        (f"ckpt export {program}", "--to", "--out") for program in ("huggingface", "dcp", "orbax")
    }


@pytest.mark.parametrize("program", ["huggingface", "dcp", "orbax"])
def test_an_export_is_written_to_out_and_still_reads_to(program, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages = []
    for option in ("--out", "--to"):
        assert main(["ckpt", "export", program, "none", option, "new"]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1]
    assert messages[0].startswith("shardwright: none: there is no checkpoint here.")
