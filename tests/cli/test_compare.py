"""`compare`: every figure of a column is that of the layout's own plan, and the fastest is the fastest of those that run."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main

OPTIONS = "--chips h100:2x8 --batch 16 --length 4096"


def said(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    main([*line.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_each_column_is_the_plan_of_its_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lock = tmp_path / "a.lock.json"
    main(f"lock llama3-8b --layout hsdp --mesh data=2,fsdp=8 {OPTIONS} --out {lock}".split())
    capsys.readouterr()
    names = ["fsdp:data=1,fsdp=16", "fsdp-tp:data=1,fsdp=4,tensor=4", str(lock)]
    columns = said(capsys, f"compare {' '.join(names)} --model llama3-8b {OPTIONS}")["compared"]
    assert [column["name"] for column in columns] == names
    for column, layout, mesh in zip(columns[:2], ("fsdp", "fsdp-tp"), ("fsdp=16", "fsdp=4,tensor=4"), strict=True):
        plan = said(capsys, f"plan llama3-8b --layout {layout} --mesh {mesh} {OPTIONS}")
        assert column["answer"] == plan["answer"]
        assert column["memory"] == plan["memory"]
    locked = json.loads(lock.read_text())
    assert columns[2]["answer"] == locked["answer"]
    main(["compare", *names, "--model", "llama3-8b", *OPTIONS.split()])
    text = capsys.readouterr().out
    rates = {column["name"]: column["answer"]["tokens_per_s"] for column in columns}
    assert max(rates, key=lambda name: rates[name]) in text.splitlines()[-1]
    assert all(f"{column['answer']['tokens_per_s_per_device']:,.0f}" in text for column in columns)


def test_what_does_not_fit_is_not_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    line = "compare ddp fsdp --model llama3-70b --chips h100:1x8 --batch 8 --length 4096"
    first, second = said(capsys, line)["compared"]
    assert first["answer"]["fits"] is False
    main(line.split())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("is fsdp." if second["answer"]["fits"] else "fits, and has a time.")


def test_without_chips_nothing_is_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "fsdp", "hsdp:data=2,fsdp=4", "cp", "--model", "llama3-test", "--devices", "8", "--batch", "8"])
    assert "fast" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare --model llama3-8b", "compare takes two layouts, plans or locks at least"),
        ("compare fsdp --model llama3-8b", "compare takes two layouts, plans or locks at least"),
        ("compare fsdp tp", "'fsdp' is a layout, and a layout is planned for a model"),
        ("compare fsdp fdsp --model llama3-8b", "no layout is called 'fdsp'. Did you mean 'fsdp'?"),
        ("compare fsdp tp --model llama3-8b --mesh expert=2", "--mesh: no layout here has a mesh axis 'expert'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_among_the_layouts_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("compare", "diff"):
        assert main([verb, "llama3-8b", "fsdp"]) == 2
        assert "'llama3-8b' is a model, and layouts are compared: --model llama3-8b" in capsys.readouterr().err


def test_of_two_models_none_is_the_fastest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{model}.lock.json") for model in ("llama3-8b", "llama3-1b")]
    for path in paths:
        main(["lock", Path(path).name.partition(".")[0], "--layout", "fsdp", *OPTIONS.split(), "--out", path])
    capsys.readouterr()
    for verb in ("compare", "diff"):
        main([verb, *paths])
        text = capsys.readouterr().out
        assert "llama3-8b" in text
        assert "llama3-1b" in text
        assert "fastest" not in text
        assert "times as many tokens" not in text


@pytest.mark.parametrize("layout", ["ddp", "tp", "fsdp-tp", "hsdp", "fsdp-tp:tensor=4"])
def test_a_lock_of_what_was_chosen_is_compared_with_any_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layout: str
) -> None:
    lock = str(tmp_path / "a.lock.json")
    main(["lock", "llama3-8b", "--chips", "h100:2x8", "--out", lock])
    capsys.readouterr()
    first, second = said(capsys, f"compare {lock} {layout}")["compared"]
    for side in (first, second):
        assert prod(side["mesh"].values()) == 16
    if ":" in layout:
        assert second["mesh"]["tensor"] == 4
