"""JSON: what is read, and the full message of every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.findings.errors import InputError
from shardwright.files import parse_json, read_json
from tests.files.values import JSON_VALUES, plain


@given(JSON_VALUES)
def test_values_are_those_of_the_standard_library(value: object) -> None:
    assert plain(parse_json(json.dumps(value))) == value


def test_values_have_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 7168}')
    assert read_json(path).value["hidden_size"].position.source == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", "f.json: the file is empty; it should hold JSON."),
        (
            # Not a comma before the end: Python 3.13 has another message for it.
            '{\n  "a": 1,\n2}',
            "f.json:3:1: not JSON: expecting property name enclosed in double quotes.\n    2}\n    ^",
        ),
        ("[1,", "f.json:1:4: not JSON: expecting value.\n    [1,\n       ^"),
        ('{"a": 1}}', 'f.json:1:9: not JSON: extra data.\n    {"a": 1}}\n            ^'),
        ('{"a": "x\ty"}', 'f.json:1:9: not JSON: invalid control character.\n    {"a": "x y"}\n            ^'),
        ('{"a": 1, "b": 2, "a": 3}', "f.json: 'a' appears twice in one object. Keep one."),
        ("[NaN]", "f.json: NaN is not a JSON number. Write a finite number, or null."),
        ("[-Infinity]", "f.json: -Infinity is not a JSON number. Write a finite number, or null."),
        ("[" * 100_000, "f.json: not readable: the values are nested too deeply."),
        ("1" * 5000, "f.json: not readable: an integer has more digits than Python converts."),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "f.json")
    assert str(caught.value) == message


@given(st.text(alphabet='{}[]",:0a\n\\ue', max_size=30))
def test_no_text_causes_any_other_error(text: str) -> None:
    try:
        parse_json(text)
    except InputError:
        return
    assert plain(parse_json(text)) == json.loads(text)
