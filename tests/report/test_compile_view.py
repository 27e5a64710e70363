"""A compiled program on a terminal: lines fit, every row has both sides, and unmatched rows are coloured."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.agreement.rewrites import REWRITES
from shardwright.compiled.findings import compiled_findings
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram, Temporary
from shardwright.core.plan.plan import Plan
from shardwright.report.compile.compile_view import compile_view
from shardwright.report.text.terminal import to_text
from shardwright.report.text.units import pretty_bytes
from tests.compiled.programs import as_planned, changed, remembered, where
from tests.cost.plans import plan_of as planned
from tests.golden.compiled_case import plan_of
from tests.golden.compiled_cases import COMPILED_CASES

WIDTHS = (80, 100, 130, 200)
CASES = {case.name: case for case in COMPILED_CASES}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def drawn(plan: Plan, program: CompiledProgram, width: int = 120, stream: io.StringIO | None = None) -> str:
    agreement = agree(plan, program)
    findings = compiled_findings(plan, program, agreement)
    view = compile_view(plan, program, agreement, findings, {"--batch": "8"})
    return to_text(view, stream or io.StringIO(), width=width)


def section_of(text: str, title: str) -> list[str]:
    """The lines below a title, up to the next line that is not indented."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(title)) + 1
    stop = next((n for n, line in enumerate(lines[start:], start) if line and not line.startswith(" ")), len(lines))
    return [line for line in lines[start:stop] if line]


@pytest.mark.parametrize("name", CASES)
def test_every_line_fits(name):
    case = CASES[name]
    plan = plan_of(case)
    for width in WIDTHS:
        for line in drawn(plan, case.program(plan), width).splitlines():
            assert len(line) <= width, line
            assert line == line.rstrip(), line


def test_the_head_names_the_target_and_the_compile_time():
    plan = planned("mixtral-test", "ep", devices=8, batch=8)
    lines = drawn(plan, as_planned(plan)).splitlines()
    assert lines[0] == "mixtral-test under ep"
    number = len(plan.collectives)
    assert f"compiled for cpu:8 in 12.5 s: {number} tensors in the collectives of its text" in lines


def test_memory_has_both_sides_to_the_byte():
    case = CASES["SW312-peak"]
    plan = plan_of(case)
    program = case.program(plan)
    lines = section_of(drawn(plan, program), "memory of one device")
    shown = {cells[0]: cells[1] for line in lines if len(cells := re.split(r"  +", line.strip())) > 1}
    predicted, compiled = plan.memory, program.memory
    assert shown["weights"] == f"{predicted.weights_bytes:,}"
    assert shown["total"] == f"{predicted.total_bytes_per_device:,}"
    assert shown["arguments"] == f"{compiled.arguments_bytes:,}"
    assert shown["temporaries"] == f"{compiled.temporaries_bytes:,}"
    assert shown["aliased with arguments"] == f"-{compiled.aliased_bytes:,}"
    assert shown["peak"] == f"{compiled.peak_bytes:,}"
    assert plan.request.chip is not None
    assert shown["TPU v5p has"] == f"{plan.request.chip.usable_bytes:,}"
    peak, usable = compiled.peak_bytes, plan.request.chip.usable_bytes
    below = 1 - predicted.total_bytes_per_device / peak
    last = f"The plan's total is {below:.1%} below the peak, which is {peak / usable:.1%} of what the chip has."
    assert lines[-1].strip() == last


def test_every_row_has_both_sides():
    plan = planned("mixtral-test", "ep", devices=8, batch=8)
    program = changed(
        as_planned(plan, "v5p:2x2x2"),
        where({"kind": "all-gather", "component": "attention", "phase": "recompute"}, lambda _: None),
    )
    rows = agree(plan, program).rows
    lines = section_of(drawn(plan, program, 160), "collectives of one step")
    table = [re.split(r"  +", line.strip()) for line in lines if line.startswith("    ")][1:]
    assert [cells[:4] for cells in table] == [
        [row.kind, "/".join(row.axes), pretty_bytes(row.predicted_bytes), pretty_bytes(row.compiled_bytes)]
        for row in rows
    ]
    (row,) = [cells for cells in table if cells[-1] == "unmatched"]
    assert row == ["all-gather", "fsdp/expert", *row[2:4], "32 / 16", "x0.5", "unmatched"]
    assert lines[-1].strip().endswith("; 1 unmatched")


@pytest.mark.parametrize(("factor", "shown"), [(1.005, "+0.50%"), (0.95, "-5.00%"), (3, "x3"), (1, "same")])
def test_small_differences_are_in_percent(factor, shown):
    plan = planned("llama3-8b", "fsdp", devices=8, batch=8)
    wanted = {"component": "logits", "kind": "all-gather"}

    def scaled(one: CompiledCollective) -> CompiledCollective:
        return replace(one, bytes_per_device=round(factor * one.bytes_per_device))

    lines = section_of(drawn(plan, changed(as_planned(plan), where(wanted, scaled)), 160), "collectives of one step")
    (line,) = [line for line in lines[lines.index("  logits") :] if "all-gather" in line]
    assert shown in line.split()


def test_a_rewrite_has_a_letter_and_its_reason():
    plan = planned("llama3-test", "fsdp", devices=8, batch=16, microbatches=2)
    program = changed(
        as_planned(plan),
        where({"kind": "all-gather", "component": "logits"}, lambda one: replace(one, count_per_step=1)),
    )
    lines = section_of(drawn(plan, program, 160), "collectives of one step")
    assert f"  a  gathered once: {REWRITES['gathered once'].reason}" in lines
    assert [line.split()[-1] for line in lines if line.startswith("    all-gather") and line.endswith(" a")] == ["a"]


def test_one_device_has_no_collectives():
    plan = planned("llama3-test", "ddp", devices=1, batch=8)
    assert "  none: the step has no collectives, as predicted\n" in drawn(plan, as_planned(plan, "cpu:1"))


def test_ten_temporaries_the_largest_first():
    plan = planned("llama3-test", "fsdp", devices=8, batch=8)
    made = [
        Temporary(
            bytes_per_device=1 << (10 + n), dtype="float32", shape=(2, n), op="fusion", component="mlp", phase="forward"
        )
        for n in range(12)
    ]
    lines = section_of(drawn(plan, remembered(as_planned(plan), largest=tuple(made))), "largest temporaries")
    sizes = [line.split("  float32")[0].strip() for line in lines if "float32" in line]
    assert sizes == [pretty_bytes(1 << (10 + n)) for n in range(11, 1, -1)]
    assert "2x11" in lines[2]
    assert "forward" in lines[2]


def test_unmatched_rows_are_red_and_rewrites_are_yellow():
    case = CASES["SW302-gathered-again"]
    plan = plan_of(case)
    text = drawn(plan, case.program(plan), 160, Terminal())
    (line,) = [line for line in text.splitlines() if "unmatched" in line and "x1.5" in line]
    assert re.search(r"\x1b\[1;31mall-gather\x1b\[0m", line)
    assert re.search(r"\x1b\[1;31munmatched\x1b\[0m", line)
    matched = [line for line in text.splitlines() if "same" in line and "reduce-scatter" in line]
    assert matched
    assert not any("\x1b[1;31m" in line for line in matched)


def test_findings_come_last():
    case = CASES["SW302-missing-sum"]
    plan = plan_of(case)
    text = drawn(plan, case.program(plan))
    assert "  findings  1 error\n" in text
    assert text.rpartition("\nfindings\n")[2].startswith("\nerror SW302: ")
