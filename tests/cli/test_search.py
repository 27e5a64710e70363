"""`search`: each answer's command plans the same step, what is typed stays, and what cannot be searched is said."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.cost.hardware.machine import Machine
from shardwright.layouts import load_layout
from shardwright.search import searching
from shardwright.search.space import space as space_module
from tests.matrix import rest

KEYS = {
    "model",
    "machine",
    "batch",
    "length",
    "memory_share",
    "engine",
    "chosen",
    "layouts",
    "priced",
    "seconds",
    "within",
    "complete",
    "least_seconds_left",
    "ended",
    "answers",
}
OF_AN_ANSWER = {
    "rank",
    "layout",
    "mesh",
    "command",
    "layout_file",
    "setting",
    "answer",
    "bytes_between_domains",
    "unbeaten",
    "loses",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and searches by this process alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwright.cli.searching.search.processes_here", lambda: 1)
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of every fourth layout."""
    whole = space_module.space_of

    def some(request: Any, machine: Machine) -> space_module.Space:
        space = whole(request, machine)
        return space_module.Space(arrangements=space.arrangements[::4], ended=space.ended, smallest=space.smallest)

    monkeypatch.setattr("shardwright.cli.searching.search.space_of", some)


def said(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, dict[str, Any]]:
    code = main([*line.split(), "--json"])
    return code, json.loads(capsys.readouterr().out)


SEARCHES = (
    "llama3-test --chips h100:2x4 --batch 16 --remat dots --microbatches 2 --keep 4",
    rest("mixtral-test --chips h100:2x4 --batch 16 --remat dots --microbatches 2 --keep 4"),
    rest("llama3-test --chips h100:1x8 --keep 9 --precision auto"),
    rest("llama3-test --chips h100:2x4 --batch 16 --engine torch --keep 9"),
    rest("deepseek3-test --chips v5e:2x4 --keep 9"),
    rest("deepseek3-test --chips h100:2x4 --engine torch --remat dots --keep 9 --move moe=all-to-all"),
    rest("llama3-test --chips h100:3x8 --batch 24 --remat full --microbatches 1 --keep 9"),
)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("line", SEARCHES)
def test_each_command_plans_the_step_of_its_answer(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, value = said(capsys, f"search {line} --budget 8m --out found.json")
    assert code == 0
    assert value["complete"]
    assert set(value) == KEYS
    assert json.loads((tmp_path / "found.json").read_text())["result"] == value
    ranks = [answer["rank"] for answer in value["answers"]]
    assert ranks[0] == 1
    assert ranks == sorted(ranks)
    assert value["answers"][0]["loses"] is None
    for answer in value["answers"]:
        assert set(answer) == OF_AN_ANSWER
        words = shlex.split(answer["command"])
        assert main([*words[1:], "--json"]) == 0, answer["command"]
        plan = json.loads(capsys.readouterr().out)
        assert plan["answer"]["step_s"] == answer["answer"]["step_s"], answer["command"]
        assert plan["answer"] == answer["answer"], answer["command"]
        for option in ("--remat", "--microbatches"):
            if option in line:
                assert option in words
                assert words[words.index(option) + 1] == line.split()[line.split().index(option) + 1]
        if answer["layout_file"] is not None:
            path = tmp_path / "found" / answer["layout"]
            assert path.read_text() == answer["layout_file"]
            assert f"{load_layout(str(path)).name}.yaml" == answer["layout"]
    # The same search goes on from its file, and has nothing left to price.
    before = value["priced"]
    again = said(capsys, f"search {line} --budget 8m --out found.json")[1]
    assert again["answers"] == value["answers"]
    assert again["priced"] == before
    assert main(f"search {line} --length 64 --out found.json".split()) == 2
    assert "another model, machine, options or version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("llama3-test", "search needs --chips"),
        ("llama3-test --chips cpu:8", "simulated devices have no speed"),
        ("llama3-test --chips h100:1x8 --mesh fsdp=8", "--mesh is what search finds"),
        ("llama3-test --chips h100:1x8 --stages 4", "--stages"),
        ("llama3-test --chips h100:1x8 --devices 8", "--devices is what search finds"),
        ("llama3-test --chips h100:1x8 --keep 0", "--keep is 0, and must be at least 1"),
        ("llama3-test --chips h100:1x8 --budget 0s", "'0s' is not a time"),
        ("llama3-test --chips h100:1x8 --budget 1ms", "'1ms' is not a time"),
        ("llama3-tset --chips h100:1x8", "no model 'llama3-tset'. Did you mean 'llama3-test'?"),
        ("llama3-test --chips h100:1x8 --out found", "must end in .json"),
        ("llama3-test --chips h100:1x8 --out no/found.json", "the folder no does not exist"),
        ("llama3-test --chips h100:1x8 --out foreign.json", "is no file of a search"),
        ("llama3-test --chips h100:1x8 --out folder.json", "folder.json"),
        ("llama3-test --chips h100:1x8 --batch 0", "--batch"),
        ("llama3-test --chips h100:1x8 --length 0", "--length"),
        ("llama3-test --chips h100:1x8 --microbatches 0", "--microbatches"),
        ("llama3-test --chips h100:1x8 --schedule fast", "fast"),
        ("llama3-test --chips h100:1x8 --remat fast", "fast"),
        ("llama3-test --chips h100:1x8 --precision fast", "fast"),
        ("llama3-test --chips h100:1x8 --move moe=fast", "fast"),
        ("llama3-test --like fsdp", "search needs --chips"),
        ("llama3-test --like fsdp --chips cpu:8", "search needs --chips"),
        ("llama3-test --like fdsp --chips h100:1x8", "fdsp"),
    ],
)
def test_what_cannot_be_searched_is_said(
    line: str, message: str, capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "foreign.json").write_text('{"a": 1}')
    (here / "folder.json").mkdir()
    monkeypatch.setattr(searching.Search, "run", lambda _: pytest.fail("it is said before the search"))
    assert main(["search", *line.split()]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text


def test_what_fits_nowhere_has_a_nearest_and_a_machine_on_which_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "search llama3-405b --chips h100:1x8 --batch 16 --remat full --budget 60s --keep 1"
    code, value = said(capsys, line)
    assert code == 1
    assert value["answers"] == []
    assert set(value) == KEYS | {"nearest", "smallest_machine"}
    nearest = value["nearest"]
    assert nearest["missing_bytes"] == nearest["needed_bytes"] - nearest["usable_bytes"] > 0
    main(line.split())
    text = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits" in text
    assert "Nearest of what does not fit: " in text
    assert f"on which it fits: {value['smallest_machine']}" in text


@pytest.mark.matrix
@pytest.mark.parametrize(
    "line", ["llama3-405b --chips h100:1x8", "deepseek3-671b --chips h100:2x8", "llama3-70b --chips v5e:2x4"]
)
def test_on_the_smallest_machine_a_search_has_an_answer(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, value = said(capsys, f"search {line} --budget 60s --keep 1")
    again = line.replace(line.split()[-1], value["smallest_machine"])
    code, value = said(capsys, f"search {again} --budget 200s --keep 1")
    assert code == 0, value


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("line", ["--batch 7 --chips h100:1x8 --length 1", "--chips h100:1x7 --batch 7 --length 13"])
def test_odd_rows_are_searched_or_the_findings_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = said(capsys, f"search llama3-test {line} --remat none --budget 60s --keep 2")
    assert code == (0 if value["answers"] else 1)
    assert value["complete"]
    assert "smallest_machine" not in value
    assert value["answers"] or value["ended"]


COMMAND = (sys.executable, "-m", "shardwright", "search", "llama3-test", "--chips", "h100:2x4", "--out", "found.json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_search_that_is_ended_leaves_no_process(number: signal.Signals, here: Path) -> None:
    with subprocess.Popen(
        COMMAND, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as search:
        deadline = time.monotonic() + 60
        while len(processes_of(search.pid)) < 1 + len(os.sched_getaffinity(0)) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.0)
        os.kill(search.pid, number)
        _, err = search.communicate(timeout=60)
    assert search.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err, err
    deadline = time.monotonic() + 10
    while (left := processes_of(search.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    content = json.loads((here / "found.json").read_text())
    assert set(content) == {"search", "priced"}


def processes_of(session: int) -> list[int]:
    """The processes of a session, without those that wait to be reaped."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            processes.append(int(path.parent.name))
    return processes


LIKES = (
    "llama3-test --like fsdp-tp --mesh fsdp=2,tensor=4 --chips h100:1x8 --batch 16",
    rest("mixtral-test --like ep --mesh fsdp=2,expert=4 --chips h100:2x4 --batch 16"),
    rest("llama3-test --like pp --mesh stage=2,fsdp=4 --chips h100:2x4 --batch 16 --microbatches 2 --engine torch"),
    rest("deepseek3-test --like ep-as-cp --mesh fsdp=2,expert=4 --chips v5e:2x4 --batch 16"),
    rest("llama3-test --like ddp --mesh data=8 --chips h100:1x8 --batch 16"),
    rest("llama3-test --like cp --mesh fsdp=4,context=2 --chips h100:1x8 --batch 16"),
)


@pytest.mark.parametrize("line", LIKES)
def test_each_change_is_faster_when_it_is_typed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = said(capsys, f"search {line} --keep 30")
    assert code == (0 if value["changes"] else 1)
    assert set(value) == {"model", "machine", "layout", "mesh", "seconds", "bytes_per_device", "changes"}
    ratios = [change["ratio"] for change in value["changes"]]
    assert ratios == sorted(ratios, reverse=True)
    typed = 0
    for change in value["changes"]:
        if not change["change"].startswith("--"):
            continue
        typed += 1
        words = line.replace("--like", "--layout").split()
        option, text = change["change"].split(maxsplit=1)
        if option in words:
            place = words.index(option)
            words[place : place + 2] = []
        assert main(["plan", *words, option, text, "--json"]) == 0, change["change"]
        plan = json.loads(capsys.readouterr().out)
        before, after = change["effect"]["seconds"]
        assert before == value["seconds"] > after
        assert plan["answer"]["step_s"] == after, change["change"]
    assert typed >= 1 or not value["changes"]
