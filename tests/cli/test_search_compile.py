"""`search --compile`: programs beside their predictions, ranked by what they hold and move; what drops out is said, and the next is compiled."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.cli.searching import compiling
from shardwright.cli.searching.apart import FailedApartError, call_apart
from shardwright.core.findings.errors import InputError
from shardwright.cost.hardware.machine import Machine
from shardwright.search.compiled import CompiledAnswer, Held, ranked_again
from shardwright.search.space import space as space_module

LINE = "search llama3-test --chips h100:1x8 --batch 16 --engine torch --remat full --microbatches 1 --budget 60s"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and searches of every third layout by this process alone."""
    whole = space_module.space_of

    def some(request: Any, machine: Machine) -> space_module.Space:
        space = whole(request, machine)
        return space_module.Space(arrangements=space.arrangements[::3], ended=space.ended, smallest=space.smallest)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwright.cli.searching.search.space_of", some)
    monkeypatch.setattr("shardwright.cli.searching.search.processes_here", lambda: 1)
    return tmp_path


def held(step_s: float, memory_bytes: int = 1) -> Held:
    return Held(memory_bytes=memory_bytes, moved_bytes=1, bytes_between=0, link_seconds=step_s, step_seconds=step_s)


def program(step_s: float, memory_bytes: int = 1) -> CompiledAnswer:
    return CompiledAnswer(
        state="fits", line="", compile_seconds=1.0, planned=held(1.0), compiled=held(step_s, memory_bytes)
    )


TOO_LARGE = CompiledAnswer(state="too large", line="SW312: the program holds 99 GiB", compile_seconds=1.0)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces the compilers: each call takes the next outcome. Gives the layouts that were compiled."""

    def replaced(*outcomes: object) -> list[str]:
        compiled: list[str] = []
        left = list(outcomes)

        def call(function: Callable[..., object], arguments: tuple[Any, ...], goes_on: object) -> object:
            del goes_on
            if function is compiling.load_compiler:
                return True
            compiled.append(arguments[1])
            outcome = left.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(compiling, "call_apart", call)
        return compiled

    return replaced


def said(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, dict[str, Any]]:
    code = main([*line.split(), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_dry_run_of_each_answer_stands_beside_its_plan(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    code, value = said(capsys, f"{LINE} --keep 3 --compile 1 --out found.json")
    assert code == 0
    first, *rest = value["answers"]
    assert value["compile"]["compiled"] == 1
    assert value["compile"]["dropped"] == []
    assert all("compiled" not in answer for answer in rest)
    planned, compiled = first["compiled"]["planned"], first["compiled"]["compiled"]
    assert planned["step_seconds"] == first["answer"]["step_s"]
    assert compiled["memory_bytes"] == pytest.approx(planned["memory_bytes"], rel=0.5)
    assert compiled["moved_bytes"] == pytest.approx(planned["moved_bytes"], rel=0.01)
    assert compiled["link_seconds"] == pytest.approx(planned["link_seconds"], rel=0.1)
    assert json.loads((here / "found.json").read_text())["result"] == value


def test_what_does_not_fit_or_fails_drops_out_and_the_next_is_compiled(
    capsys: pytest.CaptureFixture[str], programs: Callable[..., list[str]]
) -> None:
    plain = said(capsys, f"{LINE} --keep 5")[1]["answers"]
    compiled = programs(TOO_LARGE, program(3.0), FailedApartError("the compiler says no"), program(2.0))
    code, value = said(capsys, f"{LINE} --keep 5 --compile 2 --out found.json")
    assert code == 0
    assert compiled == [answer["layout"] for answer in plain[:4]]
    commands = [answer["command"] for answer in plain]
    assert len(commands) >= 5
    # The fourth has the faster program; the fifth was not compiled, and stands behind.
    shown = [answer["command"].replace("found/", "./") for answer in value["answers"]]
    assert shown == [commands[3], commands[1], commands[4]]
    assert [answer["rank"] for answer in value["answers"]] == [1, 2, 3]
    assert [answer["planned_rank"] for answer in value["answers"]] == [plain[n]["rank"] for n in (3, 1, 4)]
    assert value["answers"][0]["loses"] is None
    assert [dropped["state"] for dropped in value["compile"]["dropped"]] == ["too large", "failed"]
    # What was compiled is not compiled again; what failed is.
    compiled = programs(FailedApartError("the compiler says no"))
    assert main(f"{LINE} --keep 5 --compile 2 --out found.json".split()) == 0
    assert compiled == [plain[2]["layout"]]
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit. SW312: the program holds 99 GiB" in text
    assert "was not compiled. the compiler says no" in text
    assert "predicted and compiled" in text


def test_where_all_drop_out_it_says_so(capsys: pytest.CaptureFixture[str], programs: Callable[..., list[str]]) -> None:
    programs(TOO_LARGE, TOO_LARGE)
    assert main(f"{LINE} --keep 2 --compile 2".split()) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("does not fit. SW312") == 2
    assert "0 programs of 2: no other answer was kept: give a larger --keep." in text


@pytest.mark.parametrize(
    ("outcome", "code", "ended"),
    [(None, 0, "--compile-budget ended"), (KeyboardInterrupt(), 130, "an interrupt ended")],
)
def test_an_end_keeps_what_is_compiled(
    outcome: object,
    code: int,
    ended: str,
    capsys: pytest.CaptureFixture[str],
    programs: Callable[..., list[str]],
    here: Path,
) -> None:
    programs(program(2.0), outcome)
    assert main(f"{LINE} --keep 4 --compile 3 --out found.json".split()) == code
    text = " ".join(capsys.readouterr().out.split())
    assert f"1 program of 3: {ended} the compiling" in text
    assert len(json.loads((here / "found.json").read_text())["compiled"]) == 1
    compiled = programs(program(1.5), program(1.0))
    assert main(f"{LINE} --keep 4 --compile 3 --out found.json".split()) == 0
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--compile 0", "--compile is 0, and must be at least 1"),
        ("--compile -1", "--compile"),
        ("--compile two", "--compile"),
        (
            "--compile 12",
            "--compile is 12, and --keep is 10: only answers that are kept can be compiled. Give --keep 12",
        ),
        ("--compile 3 --keep 2", "--keep is 2"),
        ("--compile 1 --compile-budget 0s", "'0s' is not a time"),
        ("--compile 1 --like fsdp --mesh fsdp=8", "--like shows single changes"),
    ],
)
def test_what_cannot_be_compiled_is_said_before_the_search(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.search.searching.Search.run", lambda _: pytest.fail("before the search"))
    assert main(f"search llama3-test --chips h100:1x8 {line}".split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_chips_without_a_compiler_are_said_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.search.searching.Search.run", lambda _: pytest.fail("before the search"))
    assert main(["search", "llama3-test", "--chips", "mi300x:1x8", "--compile", "1"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert text.startswith("shardwright: --compile: --chips: the compiler has no description of")


@pytest.mark.parametrize("damage", ['{"state": "fits"}', "[]", '{"state": "odd"}', '{"a": 1, "state": "fits"}'])
def test_a_damaged_file_is_refused(damage: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "found.json").write_text(f'{{"search": "x", "priced": {{}}, "compiled": {{"k": {damage}}}}}')
    assert main(f"{LINE} --compile 1 --out found.json".split()) == 2
    assert "is no file of a search" in capsys.readouterr().err


def test_equal_steps_have_one_rank_and_the_smallest_is_first() -> None:
    answers = [program(1.005, 2), program(1.0, 3), program(2.0, 1), program(1.02, 1)]
    assert ranked_again(answers) == ((1, 0), (1, 1), (3, 3), (4, 2))


def exits() -> None:
    os.write(2, b"first\nthe last line\n")
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses() -> None:
    raise InputError("no such thing\nmore of it")


def breaks() -> None:
    raise RuntimeError("INTERNAL: of a compiler\nand its trace")


def hangs() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (exits, "its process ended with exit code 3: the last line"),
        (is_killed, "its process was killed: this machine may lack the memory to compile it"),
        (refuses, "no such thing"),
        (breaks, "RuntimeError: INTERNAL: of a compiler"),
    ],
)
def test_a_call_apart_that_fails_is_one_line(call: Callable[[], None], line: str) -> None:
    with pytest.raises(FailedApartError) as failed:
        call_apart(call, (), lambda: True)
    assert failed.value.line == line


def test_a_call_apart_ends_when_it_should_not_go_on() -> None:
    began = time.monotonic()
    assert call_apart(hangs, (), lambda: time.monotonic() - began < 0.5) is None
    assert call_apart(abs, (-3,), lambda: True) == 3
