"""YAML: values and positions against PyYAML's own, and the full message of every refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Located
from shardwright.files import parse_yaml, read_yaml
from tests.files.values import plain

LAYOUT = """\
name: ep-as-cp  # a preset
mesh:  {data: 1, fsdp: auto, expert: 4}
roles:
  data:   data
  fsdp:   fsdp
  expert:
    elsewhere: context
    moe: expert
on: [no, 012, 1e-3, '8', "true", 8, True, ~]
about: >
  Two lines
  in one.
"""


def test_values() -> None:
    assert plain(parse_yaml(LAYOUT)) == {
        "name": "ep-as-cp",
        "mesh": {"data": 1, "fsdp": "auto", "expert": 4},
        "roles": {"data": "data", "fsdp": "fsdp", "expert": {"elsewhere": "context", "moe": "expert"}},
        "on": ["no", "012", 1e-3, "8", "true", 8, True, None],
        "about": "Two lines in one.\n",
    }


def places(value: Located) -> Iterator[tuple[int, int]]:
    yield value.position.line, value.position.column
    if isinstance(value.value, Mapping):
        for key, item in value.value.items():
            yield value.key_position(key).line, value.key_position(key).column
            yield from places(item)
    elif isinstance(value.value, tuple):
        for item in value.value:
            yield from places(item)


def composed_places(node: yaml.Node) -> Iterator[tuple[int, int]]:
    yield node.start_mark.line + 1, node.start_mark.column + 1
    children = node.value if not isinstance(node, yaml.ScalarNode) else []
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            if isinstance(node, yaml.MappingNode) and part is child[0]:
                yield part.start_mark.line + 1, part.start_mark.column + 1
            else:
                yield from composed_places(part)


def test_positions_are_those_of_the_parser() -> None:
    assert list(places(parse_yaml(LAYOUT))) == list(composed_places(yaml.compose(LAYOUT, Loader=yaml.SafeLoader)))


def test_positions_and_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(LAYOUT)
    layout = read_yaml(path)
    assert str(layout.value["roles"].value["expert"].value["moe"].position) == f"{path}:8:10"
    assert str(layout.value["roles"].key_position("expert")) == f"{path}:6:3"


# To YAML 1.1, and so to PyYAML, 0E0 is text that needs no quotes; here it is a number.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", text)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda children: st.one_of(
        st.lists(children, max_size=4), st.dictionaries(TEXT.filter(bool), children, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES, st.booleans())
def test_reads_back_what_pyyaml_writes(value: object, flow: bool) -> None:
    # Anchors would be written for an object that occurs twice; a copy through JSON has none.
    written = yaml.safe_dump(json.loads(json.dumps(value)), default_flow_style=flow)
    assert plain(parse_yaml(written)) == value


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "my.yaml")
    assert type(caught.value) is InputError
    assert caught.value.__cause__ is None
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mesh: {fsdp: 2, expert: 4\nroles:\n  fsdp: fsdp\n",
            "my.yaml:2:6: not YAML: a ',' is missing before this, or the '}' that closes the bracket of line 1.\n"
            "    roles:\n"
            "         ^",
        ),
        (
            "a: 1\nmesh: {fsdp: 2",
            "my.yaml:2:7: not YAML: the bracket that opens here is never closed; '}' is missing.\n"
            "    mesh: {fsdp: 2\n"
            "          ^",
        ),
        ("a: [", "my.yaml:1:5: not YAML: the text ends where a value is expected.\n    a: [\n        ^"),
        (
            'about: "abc\n',
            'my.yaml:1:8: not YAML: the quote that opens here is never closed.\n    about: "abc\n           ^',
        ),
        (
            "about: FSDP: all of it\n",
            "my.yaml:1:12: not YAML: a ': ' is inside a value, or the lines are not aligned, or a space is missing "
            "after the ':' of the line before.\n    about: FSDP: all of it\n               ^",
        ),
        (
            "mesh:\n\tfsdp: 2\n",
            "my.yaml:2:1: not YAML: a tab is at the start of a value. Indent with spaces.\n     fsdp: 2\n    ^",
        ),
        ("a: @x\n", "my.yaml:1:4: not YAML: a word cannot begin with '@'. Put it in quotes.\n    a: @x\n       ^"),
        (
            "mesh:\n  fsdp: 2\n expert: 4\n",
            "my.yaml:3:2: not YAML: this line is indented differently from its neighbours. Align it with them.\n"
            "     expert: 4\n     ^",
        ),
        (
            "mesh: 1\n- fsdp\n",
            "my.yaml:2:1: not YAML: a list begins among the keys of a mapping. Indent it under a key of its own.\n"
            "    - fsdp\n    ^",
        ),
        (
            "- fsdp\nmesh: 1\n",
            "my.yaml:2:1: not YAML: a key of a mapping is in a list. Indent it, or begin the line with '- '.\n"
            "    mesh: 1\n    ^",
        ),
        (
            "a: 'x' y\n",
            "my.yaml:1:8: not YAML: the value before this has ended. Put the whole value in quotes.\n"
            "    a: 'x' y\n           ^",
        ),
        ("a: }\n", "my.yaml:1:4: not YAML: a value is expected here; found '}'.\n    a: }\n       ^"),
        ("a: x\nb\n", "my.yaml:2:1: not YAML: a ':' is missing after this key.\n    b\n    ^"),
        (
            'a: "\\q"\n',
            "my.yaml:1:6: not YAML: found unknown escape character 'q', while scanning a double-quoted scalar.\n"
            '    a: "\\q"\n         ^',
        ),
        ("a: \x07b\n", "my.yaml:1:4: not YAML: the character U+0007 is not allowed in a text.\n    a:  b\n       ^"),
    ],
)
def test_not_yaml(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.yaml: the file is empty; it should hold YAML."),
        ("# later\n", "my.yaml: the file has only comments; it should hold YAML."),
        (
            "a: 1\nmesh: 2\n'mesh': 3\n",
            "my.yaml:3:1: 'mesh' appears twice in this mapping, first on line 2. Keep one.\n    'mesh': 3\n    ^^^^",
        ),
        (
            "mesh: {fsdp:2}\n",
            "my.yaml:1:8: 'fsdp:2' has no value. Write a space after the ':'.\n    mesh: {fsdp:2}\n           ^^^^^^",
        ),
        (
            "a: &x 1\n",
            "my.yaml:1:4: anchors ('&x') are not read. Write the value out where it is used.\n    a: &x 1\n       ^^",
        ),
        ("a: *xy\n", "my.yaml:1:4: aliases ('*xy') are not read. Write the value out.\n    a: *xy\n       ^^^"),
        (
            "<<: {a: 1}\n",
            "my.yaml:1:1: merge keys ('<<') are not read. Write the entries out.\n    <<: {a: 1}\n    ^^",
        ),
        (
            "a: !!str 1\n",
            "my.yaml:1:4: tags ('!!str') are not read. Leave it out; quotes make a text of a number.\n"
            "    a: !!str 1\n       ^",
        ),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            "my.yaml:1:4: tags ('!!python/object/apply:os.getcwd') are not read. Leave it out; quotes make a text of a "
            "number.\n    a: !!python/object/apply:os.getcwd []\n       ^",
        ),
        (
            "[a, b]: 1\n",
            "my.yaml:1:1: a key must be a word; this is a list or a mapping.\n    [a, b]: 1\n    ^",
        ),
        ("{'': 1}\n", "my.yaml:1:2: a key is missing before this ':'.\n    {'': 1}\n     ^"),
        (
            "a: 1\n---\nb: 2\n",
            "my.yaml:2:1: a second document begins here; a file has one. Move it to a file of its own.\n    ---\n    ^^^",
        ),
        (
            "[" * 60 + "]" * 60,
            "my.yaml:1:51: nested more than 50 levels deep.\n    " + "[" * 60 + "]" * 40 + "...\n" + " " * 54 + "^",
        ),
    ],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_key_with_a_colon_that_has_a_value_or_quotes_is_a_key() -> None:
    assert plain(parse_yaml("{a:b: 1, 'c:d': }")) == {"a:b": 1, "c:d": None}


@given(st.text(alphabet="ab:- {}[],\n\t'\"#&*!|>%@1?~<\\", max_size=25))
def test_no_text_causes_any_other_error(text: str) -> None:
    try:
        parse_yaml(text)
    except InputError:
        return
