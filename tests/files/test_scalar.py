"""Values of unquoted words: everything is text except what every reader expects to be more."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.files.scalar import plain_value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("Null", None),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("0", 0),
        ("-7", -7),
        ("+12", 12),
        ("1e-3", 1e-3),
        ("1e5", 1e5),
        ("-2.E+8", -2e8),
        (".5", 0.5),
        ("5.", 5.0),
        ("3.0", 3.0),
    ],
)
def test_values_that_are_not_text(written: str, value: object) -> None:
    assert plain_value(written) == value
    assert type(plain_value(written)) is type(value)


@pytest.mark.parametrize(
    "written",
    [
        *("on", "off", "yes", "no", "y", "n", "On", "NO"),  # booleans in YAML 1.1
        *("012", "0o14", "0x1F", "0b11", "1_000", "190:20:30", "00"),  # integers in YAML 1.1 or 1.2
        *(".inf", "-.Inf", ".nan", "1e999", "1_0.5", "012.5"),  # floats in YAML 1.1 or 1.2
        *("2024-01-01", "=", "<<"),  # a date, a default value, a merge key in YAML 1.1
        *(".", "-", "+", "e5", ".e5", "1e", "1.2.3", "tRue", "nULL", "--1", "1 2", "9" * 500),
        *("ep-as-cp", "v5p:4x4x4", "fsdp"),
    ],
)
def test_everything_else_is_text(written: str) -> None:
    assert plain_value(written) == written


@given(st.one_of(st.integers(-(10**99), 10**99), st.floats(allow_nan=False, allow_infinity=False)))
def test_reads_every_number_as_json_does(number: float) -> None:
    written = json.dumps(number)
    assert plain_value(written) == json.loads(written)
    assert type(plain_value(written)) is type(json.loads(written))
