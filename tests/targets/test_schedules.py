"""The page of compiled schedules is that of what is stored, and what it counts of a program is what the program's text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.compiled.reading.overlap import computations_with_products, is_overlapped
from shardwright.compiled.text.hlo import parse
from tests.targets.schedules import PAGE, cases, stored, text_of_page
from tests.targets.test_targets import run_compile

ARGUMENTS = "llama3-8b --set num_layers=2 --layout fsdp --mesh fsdp=8 --batch 8 --length 2048 --chips {}"
PRODUCT = re.compile(r"\b(?:dot|convolution|ragged-dot)\(|custom_call_target=\"(?:tpu_custom_call|__cu(?:blas|dnn))")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
BODY = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
START = re.compile(r"%(\S+) = .* (?:all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)-start\(")


def test_the_stored_results_are_of_the_cases() -> None:
    assert set(stored()) <= {name for name, _ in cases()}
    for found in stored().values():
        assert all(0 <= row["exposed"] <= row["bytes"] for row in found.get("kinds", {}).values())


@pytest.mark.matrix
def test_the_page_is_that_of_the_stored_results() -> None:
    """With the prices of all published steps under each way, which take five seconds."""
    assert PAGE.read_text(encoding="utf-8") == text_of_page(), "python -m tests.targets.schedules page"


@pytest.mark.targets
@pytest.mark.parametrize("chips", ["h100:8", "v5p:2x2x2"])
def test_only_products_hide_a_collective(chips: str, tmp_path: Path) -> None:
    """Beside a count of lines: of each start the lines up to its done, and whether one of them multiplies, itself or in what it calls."""
    text_file = tmp_path / "program.txt"
    output = run_compile([*ARGUMENTS.format(chips).split(), "--hlo", str(text_file)])
    text = text_file.read_text(encoding="utf-8")
    bodies = dict(BODY.findall(text))

    def multiplies(line: str, depth: int = 0) -> bool:
        inner = (bodies.get(name, "") for name in CALLED.findall(line))
        return bool(PRODUCT.search(line)) or (depth < 8 and any(multiplies(one, depth + 1) for one in inner))

    program = parse(text)
    with_products, seen = computations_with_products(program), set[bool]()
    for name, body in bodies.items():
        lines = body.splitlines()
        for number, line in enumerate(lines):
            if (start := START.search(line)) is None or SYNCHRONOUS.search(line):
                continue
            done = next(n for n in range(number, len(lines)) if f"-done(%{start[1]})" in lines[n])
            counted = any(multiplies(one) for one in lines[number + 1 : done])
            where = program.computations[name]
            assert is_overlapped(with_products, where, where.by_name[start[1]]) == counted, (name, start[1])
            seen.add(counted)
    rows = output["compiled"]["collectives"]
    assert {row["overlapped"] for row in rows} >= seen
    if chips.startswith("h100"):
        assert seen == {True, False}
