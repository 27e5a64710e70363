"""A finding as text and as JSON, their order, and what an error carries."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from shardwright import FindingsError
from shardwright.core.findings.codes import CODES, SEVERITIES
from shardwright.core.findings.errors import raise_errors
from shardwright.core.findings.finding import Finding, count_by_severity, worst_first
from shardwright.core.findings.position import Position
from shardwright.core.findings.thresholds import THRESHOLDS

FULL = Finding(
    code="SW107",
    severity="error",
    tensor="layers.attention.k",
    where="dim 1 ('kv_heads') of layers.attention.k",
    position=Position(source="mine.yaml", line=3, column=5),
    notation="embed kv_heads/tensor head_dim",
    mark=(6, 21),
    found="8 KV heads over tensor 16\nand a second line",
    needed="a product that divides 8",
    fix="--mesh tensor=8",
    cost="50% of the devices",
)
PLAIN = Finding(code="SW105", severity="info", where="move.moe", found="'ring'", needed="nothing")


def test_text_has_five_parts_and_a_caret_under_the_word():
    assert FULL.text() == (
        "error SW107: The axes of a dim divide it, in whole units: heads, KV heads, experts.\n"
        "  where  mine.yaml:3:5: dim 1 ('kv_heads') of layers.attention.k\n"
        "         embed kv_heads/tensor head_dim\n"
        "               ^^^^^^^^^^^^^^^\n"
        "  found  8 KV heads over tensor 16\n"
        "         and a second line\n"
        "  needed a product that divides 8\n"
        "  fix    --mesh tensor=8\n"
        "  cost   50% of the devices"
    )


def test_text_leaves_out_what_is_not_known():
    assert [line.split()[0] for line in PLAIN.text().splitlines()] == ["info", "where", "found", "needed"]


def test_json_has_the_fields_of_the_contract_and_is_json():
    data = json.loads(json.dumps(FULL.to_json()))
    assert {"code", "severity", "law", "where", "found", "needed", "fix", "cost"} <= set(data)
    assert data["where"].startswith("mine.yaml:3:5: ")
    assert data["position"] == {"source": "mine.yaml", "line": 3, "column": 5}
    assert data["notation"][slice(*data["mark"])] == "kv_heads/tensor"
    assert set(PLAIN.to_json()) == {"code", "severity", "law", "where", "found", "needed", "fix", "cost"}


def test_worst_first_and_counts():
    warning = Finding(code="SW117", severity="warning", where="", found="", needed="")
    assert [f.severity for f in worst_first([PLAIN, warning, FULL])] == ["error", "warning", "info"]
    assert count_by_severity([PLAIN, FULL, FULL]) == {"error": 2, "warning": 0, "info": 1}


def test_only_errors_are_raised_and_they_survive_a_pickle():
    raise_errors([PLAIN])
    with pytest.raises(FindingsError) as caught:
        raise_errors([PLAIN, FULL])
    assert caught.value.findings == (FULL,)
    assert caught.value.exit_code == 1
    again = pickle.loads(pickle.dumps(FindingsError([FULL])))
    assert "SW107" in str(again)


def test_a_code_that_nobody_knows_cannot_be_found():
    with pytest.raises(AssertionError):
        Finding(code="SW999", severity="info", where="", found="", needed="")


def test_codes_are_well_formed_and_every_threshold_has_a_reason():
    for code, kind in CODES.items():
        assert re.fullmatch(r"SW[1-6]\d\d", code)
        assert kind.code == code
        assert kind.severity in SEVERITIES
        assert kind.law.endswith(".")
        assert not kind.title.endswith(".")
    assert all(threshold.why and threshold.value > 0 for threshold in THRESHOLDS.values())
