"""A declaration gives every tensor the placement of its layout, and changes are listed statement by statement."""

from __future__ import annotations

import json

import pytest

from shardwright import Request, load_layout, make_plan, preset_names
from shardwright.core.findings.position import located
from shardwright.core.layout.declaration import declaration, declared_changes
from shardwright.core.layout.reading import read_layout
from shardwright.files import parse_yaml
from shardwright.models import build

BASE = """\
name: mine
mesh: {data: 1, fsdp: 2, expert: 4}
roles:
  data:   data
  fsdp:   {elsewhere: fsdp, weights: [mlp, embed]}
  expert: {elsewhere: fsdp, moe: expert}
move: {attention: gather, moe: all-to-all}
rules:
  attention: {q_lora: [fsdp]}
"""


def layout(text: str):
    return read_layout(parse_yaml(text, "mine.yaml"))


def changes(old: str, new: str) -> list[str]:
    text = BASE.replace(old, new)
    assert text != BASE
    before = json.loads(json.dumps(declaration(layout(BASE))))
    return [f"{change.position}: {change.text}" for change in declared_changes(before, layout(text))]


@pytest.mark.parametrize("name", preset_names())
def test_a_declaration_is_a_layout_of_its_own(name):
    preset = load_layout(name)
    again = read_layout(located(json.loads(json.dumps(declaration(preset)))))
    dumps = [
        make_plan(Request(layout=one, table=build("deepseek3-test"), batch=8, length=64, devices=8)).dump()
        for one in (preset, again)
    ]
    assert dumps[0] == dumps[1]
    assert declared_changes(declaration(preset), again) == ()
    assert declared_changes(declaration(again), preset) == ()


def test_options_and_rules_are_in_it():
    assert declaration(layout(BASE))["roles"]["fsdp"]["weights"] == ["mlp", "embed"]
    assert declaration(layout(BASE))["rules"] == {"attention": {"q_lora": ["fsdp"]}}
    again = read_layout(located(declaration(layout(BASE))))
    assert declaration(again) == declaration(layout(BASE))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: mine", "name: other\nabout: In other words.", []),
        ("fsdp: 2", "fsdp: auto", ["mine.yaml:2:17: mesh axis 'fsdp' is 'auto', and was 2"]),
        ("fsdp: 2", "fsdp: {size: 2, link: dcn}", ["mine.yaml:2:17: mesh axis 'fsdp' is 2 over dcn, and was 2"]),
        (
            "fsdp: 2, expert: 4",
            "expert: 4, fsdp: 2",
            ["mine.yaml:2:1: the order of the mesh axes is data, expert, fsdp, and was data, fsdp, expert"],
        ),
        (
            "elsewhere: fsdp, moe: expert",
            "elsewhere: fsdp, attention: context, router: context, moe: expert",
            ["mine.yaml:6:3: the role of 'expert' in attention and router is 'context', and was 'fsdp'"],
        ),
        (
            "expert: {elsewhere: fsdp, moe: expert}",
            "expert: {elsewhere: fsdp, moe: expert, weights: whole}",
            ["mine.yaml:6:3: option 'weights' of 'expert' is 'whole', and was not there"],
        ),
        ("[mlp, embed]", "[embed]", ["mine.yaml:5:3: option 'weights' of 'fsdp' is [embed], and was [mlp, embed]"]),
        ("moe: all-to-all", "moe: ring", ["mine.yaml:7:1: move of 'moe' is 'ring', and was 'all-to-all'"]),
        (
            "{q_lora: [fsdp]}",
            "{q_lora: [expert], kv_lora: []}",
            [
                "mine.yaml:9:15: the rule for 'q_lora' in 'attention' is [expert], and was [fsdp]",
                "mine.yaml:9:33: the rule for 'kv_lora' in 'attention' is [], and was not there",
            ],
        ),
        ("rules:\n  attention: {q_lora: [fsdp]}\n", "", ["None: the rule for 'q_lora' in 'attention' is not there, and was [fsdp]"]),
    ],
)  # fmt: skip
def test_changes(old, new, expected):
    assert changes(old, new) == expected


def test_an_axis_that_was_added_and_one_that_was_removed():
    new = BASE.replace("data: 1, ", "").replace("  data:   data\n", "")
    before = declaration(layout(BASE))
    (change,) = declared_changes(before, layout(new))
    assert change.text == "mesh axis 'data' is not there, and was 1"
    assert str(change.position) == "mine.yaml:2:1"
    (change,) = declared_changes(declaration(layout(new)), layout(BASE))
    assert change.text == "mesh axis 'data' is 1, and was not there"
    assert change.to_json() == {"where": "mesh axis 'data'", "before": "not there", "after": "1"}
