"""A finding looks the same to a person, in an exception and in a log: one renderer, with a caret that stays in place."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.report.plan.findings_view import counted, findings_list
from shardwright.report.text.terminal import to_text
from tests.golden.layouts_matrix import cases, make

NOTATION = "embed/fsdp kv_heads/tensor head_dim"
ERROR = Finding(
    code="SW107",
    severity="error",
    where="dim 1 ('kv_heads') of layers.attention.k",
    found="4 KV heads over tensor 8: half of a head on each device",
    needed="a product that divides 4: 1, 2 or 4",
    fix="--mesh tensor=4",
    cost="8 devices for 4 heads",
    position=Position(source="mine.yaml", line=7, column=3),
    notation=NOTATION,
    mark=(11, 26),
)
INFO = Finding(code="SW121", severity="info", where="layout 'fsdp'", found="a", needed="b")


def drawn(findings: list[Finding], width: int) -> str:
    return to_text(lambda columns: findings_list(findings, columns), io.StringIO(), width=width)


def test_whole_text():
    assert drawn([INFO, ERROR], 100) == (
        "error SW107: The axes of a dim divide it, in whole units: heads, KV heads, experts.\n"
        "  where  mine.yaml:7:3: dim 1 ('kv_heads') of layers.attention.k\n"
        "         embed/fsdp kv_heads/tensor head_dim\n"
        "                    ^^^^^^^^^^^^^^^\n"
        "  found  4 KV heads over tensor 8: half of a head on each device\n"
        "  needed a product that divides 4: 1, 2 or 4\n"
        "  fix    --mesh tensor=4\n"
        "  cost   8 devices for 4 heads\n"
        "\n"
        "info SW121: A layout states when it pays.\n"
        "  where  layout 'fsdp'\n"
        "  found  a\n"
        "  needed b\n"
    )


def test_lines_that_are_too_long_hang_below_their_label():
    assert "  found  4 KV heads over tensor 8: half of a head on each\n         device\n" in drawn([ERROR], 60)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_caret_stays_under_its_place(width):
    lines = drawn([ERROR], width).splitlines()
    (above, below) = next((a, b) for a, b in pairwise(lines) if "^" in b)
    start = below.index("^")
    assert above[start : start + below.count("^")] == "kv_heads/tensor"


@pytest.mark.parametrize("word", ["experts/expert", "batch/data/fsdp/context", "embed/tensor", "mlp"])
def test_a_notation_wider_than_the_terminal_is_truncated_around_the_caret(word):
    notation = "experts/expert batch/data/fsdp/context groups slots embed/tensor mlp"
    start = notation.index(word)
    finding = replace(ERROR, notation=notation, mark=(start, start + len(word)))
    lines = drawn([finding], 60).splitlines()
    (above, below) = next((a, b) for a, b in pairwise(lines) if "^" in b)
    first = below.index("^")
    assert above[first : first + below.count("^")] == word
    assert len(above) <= 60
    assert above.strip().replace("...", "") in notation


@pytest.mark.parametrize(("preset", "model"), list(cases()))
def test_it_is_the_text_that_an_exception_has(preset, model):
    for finding in make(preset, model).findings:
        assert drawn([finding], 10_000) == f"{finding.text()}\n"


def test_counted():
    assert counted([ERROR, INFO, INFO, ERROR]) == "2 errors, 2 info"
    assert counted([]) == "no findings"
