"""Roles, sizes and rules read from the text of a layout; and every fault of a text, at its place, with its fix."""

from __future__ import annotations

import re

import pytest

from shardwright import FindingsError, load_layout, preset_names
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import located
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.role_reading import components_of, roles_everywhere
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.files import parse_yaml


def read(text: str) -> Layout:
    return read_layout(parse_yaml(text, "mine.yaml"))


def faults(text: str) -> tuple[Finding, ...]:
    with pytest.raises(FindingsError) as caught:
        read(text)
    return caught.value.findings


HEAD = "name: mine\nmesh: {data: 1, fsdp: auto, expert: 4}\nroles:\n  data: data\n  fsdp: fsdp\n"


@pytest.mark.parametrize("preset", preset_names())
def test_presets_are_read_and_have_a_description(preset):
    layout = load_layout(preset)
    assert layout.name == preset
    assert layout.about.endswith(".")
    assert layout.pays
    for axis, entry in layout.entries.items():
        assert set(entry.roles) == set(COMPONENTS)
        assert entry.position is not None
        assert entry.position.source == f"{preset}.yaml"
        assert layout.mesh[axis].position is not None


def test_an_entry_gives_one_role_in_each_component():
    layout = read(HEAD + "  expert: {elsewhere: context, moe: expert, attention: fsdp}\n")
    entry = layout.entries["expert"]
    assert entry.declared == {"moe", "attention"}
    assert layout.role("expert", "moe") == "expert"
    assert layout.role("expert", "attention") == "fsdp"
    assert layout.role("expert", "router") == "context"


def test_elsewhere_leaves_an_axis_idle_where_its_role_has_nothing_to_shard():
    text = "name: m\nmesh: {tensor: 2, stage: 2}\nroles: {tensor: tensor, stage: {elsewhere: stage}}"
    layout = read(text)
    assert [c for c in COMPONENTS if layout.role("tensor", c) == "idle"] == ["input", "residual", "router"]
    assert [c for c in COMPONENTS if layout.role("stage", c) == "idle"] == ["input", "embedding", "logits"]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_roles_are_allowed_where_the_role_table_has_them(role, parallel):
    spread = roles_everywhere({}, role, sequence_parallel=parallel)
    can = components_of(role, sequence_parallel=parallel)
    assert {c for c, r in spread.items() if r == role} == set(can)
    assert set(spread.values()) <= {role, "idle"}
    assert set(can) - set(ROLES[role].components) == ({"residual"} if role == "tensor" and parallel else set())


def test_options_rules_and_movements_are_kept():
    layout = read(
        "mesh: {data: {size: 2, link: dcn}, fsdp: auto}\n"
        "name: mine\n"
        "about: a\n"
        "pays: b\n"
        "roles: {data: data, fsdp: {elsewhere: fsdp, weights: [mlp, embed]}}\n"
        "move: {attention: ring, moe: auto}\n"
        "rules: {attention: {q_lora: [fsdp], kv_heads: []}, mlp: {mlp: fsdp}}\n"
    )
    assert (layout.mesh["data"].size, layout.mesh["data"].link, layout.mesh["fsdp"].size) == (2, "dcn", "auto")
    assert layout.entries["fsdp"].weights == ("mlp", "embed")
    assert (layout.move_attention, layout.move_moe) == ("ring", "auto")
    assert [(r.component, r.logical_axis, r.axes) for r in layout.rules] == [
        ("attention", "q_lora", ("fsdp",)),
        ("attention", "kv_heads", ()),
        ("mlp", "mlp", ("fsdp",)),
    ]
    assert [str(r.position) for r in layout.rules] == ["mine.yaml:7:21", "mine.yaml:7:37", "mine.yaml:7:58"]


def test_a_layout_may_be_a_dict_of_a_program_and_take_its_name_from_outside():
    layout = read_layout(located({"mesh": {"fsdp": 8}, "roles": {"fsdp": "fsdp"}}), name="program")
    assert layout.name == "program"
    assert layout.source == "<python>"


def test_entries_are_in_mesh_order():
    layout = read("name: m\nmesh: {a: 2, b: 2}\nroles: {b: fsdp, a: data}")
    assert tuple(layout.entries) == tuple(layout.mesh) == ("a", "b")


FAULTS = [
    # text, then (code, line:column, what is found, the fix) of each fault
    ("[1]", [("SW120", "1:1", "a list", "")]),
    (
        "about: x\n",
        [
            ("SW120", "1:1", "no name", "Add 'name: my-layout'."),
            ("SW120", "1:1", "no mesh", "Add 'mesh: {fsdp: auto}'."),
            ("SW120", "1:1", "no roles", "Add 'roles:'."),
        ],
    ),
    ("name: 3\nmesh: {a: 1}\nroles: {a: data}\n", [("SW120", "1:7", "name 3", "Write name: '...'.")]),
    (
        "name: m\nmesh: {}\nroles: {}\n",
        [("SW120", "2:7", "no axis", "Write 'mesh: {fsdp: auto}'.")],
    ),
    (
        "name: m\nmehs: {a: 1}\nroles: {a: data}\n",
        [
            ("SW111", "2:1", "unknown key 'mehs'", "Write 'mesh'."),
            ("SW120", "1:1", "no mesh", "Add 'mesh: {fsdp: auto}'."),
        ],
    ),
    (
        "name: m\nmesh: {a: true, b: 0, c: -2, d: 1.5}\nroles: {a: data, b: data, c: data, d: data}\n",
        [
            ("SW106", f"2:{column}", f"size {size}", f"Write '{axis}: 1' for an axis that is not used.")
            for column, size, axis in ((11, "true", "a"), (20, "0", "b"), (26, "-2", "c"), (33, "1.5", "d"))
        ],
    ),
    (
        "name: m\nmesh: {a: {size: 2, lnik: dcn}, b: {size: 2, link: wifi}}\nroles: {a: data, b: data}\n",
        [("SW111", "2:21", "unknown key 'lnik'", "Write 'link'."), ("SW111", "2:52", "unknown value 'wifi'", "")],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, moe: exprt}\n",
        [("SW111", "6:34", "unknown role 'exprt'", "Write 'expert'.")],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, mo: expert}\n",
        [("SW111", "6:29", "unknown component or option 'mo'", "Write 'moe'.")],
    ),
    (HEAD, [("SW120", "2:29", "no entry under 'roles'", "Add 'expert: idle' if it is to do nothing.")]),
    (
        HEAD + "  expert: {moe: expert}\n",
        [
            (
                "SW120",
                "6:3",
                "no role in input, embedding, residual, attention, mlp, router, logits",
                "Add 'elsewhere: idle', or the role it has there.",
            )
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: expert}\n",
        [("SW119", "6:23", "role 'expert' outside 'moe'", "Write 'expert: {elsewhere: fsdp, moe: expert}'.")],
    ),
    (
        HEAD + "  expert: {elsewhere: stage, embedding: stage}\n",
        [("SW119", "6:41", "role 'stage', which has nothing to shard in 'embedding'", "Write 'embedding: idle'.")],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, attention: stage}\n",
        [
            (
                "SW119",
                "6:3",
                "role 'stage' in some components of a layer and not in residual, mlp, router, moe",
                "Write 'expert: stage'.",
            )
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: data, weights: whole}\n",
        [("SW119", "6:29", "option 'weights' on an axis that does not shard weights at rest", "Take 'weights' out.")],
    ),
    (
        HEAD + "  expert: {elsewhere: tensor, residual: idle, sequence_parallel: true}\n",
        [
            (
                "SW119",
                "6:47",
                "option 'sequence_parallel' on an axis that is 'idle' in 'residual'",
                "Write 'residual: tensor', or take 'sequence_parallel' out.",
            )
        ],
    ),
    (
        "name: m\nmesh: {a/b: 2, 1: 2}\nroles: {a/b: fsdp, 1: data}\n",
        [
            ("SW120", "2:8", "a name that the notation cannot write", "Name it 'a_b', here and under 'roles'."),
            ("SW120", "2:16", "a name that the notation cannot write", "Name it 'axis_1', here and under 'roles'."),
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: fspd, weights: whole}\n",
        [("SW111", "6:23", "unknown role 'fspd'", "Write 'fsdp'.")],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, keep_gathered: 1}\n",
        [("SW120", "6:44", "keep_gathered 1", "Write 'keep_gathered: true'.")],
    ),
    (
        HEAD + "  expert: {elsewhere: data, keep_gathered: true}\n",
        [
            (
                "SW119",
                "6:29",
                "option 'keep_gathered' on an axis that gathers no weights",
                "Take 'keep_gathered' out.",
            )
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, keep_gathered: true}\n",
        [
            (
                "SW119",
                "6:3",
                "option 'keep_gathered', which 'fsdp' does not have: weights of 'embedding' are gathered over both at once",
                "Write 'keep_gathered: true' for 'fsdp' too.",
            )
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, optimizer: shard}\n",
        [("SW119", "6:29", "option 'optimizer' on an axis that replicates no weights", "Take 'optimizer' out.")],
    ),
    (
        HEAD + "  expert: {elsewhere: data, gradients: shard}\n",
        [("SW119", "6:29", "option 'gradients' without 'optimizer'", "Write 'optimizer: shard' too.")],
    ),
    (
        HEAD + "  expert: {elsewhere: data, optimizer: true, gradients: whole}\n",
        [
            ("SW120", "6:40", "optimizer true", "Write 'optimizer: shard'."),
            ("SW120", "6:57", "gradients 'whole'", "Write 'gradients: shard'."),
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: stage, virtual: 0, schedule: interleave}\n",
        [
            ("SW120", "6:39", "virtual 0", "Write 'virtual: 2'."),
            ("SW111", "6:52", "unknown schedule 'interleave'", "Write 'interleaved'."),
        ],
    ),
    (
        HEAD + "  expert: {elsewhere: fsdp, virtual: 2}\n",
        [("SW119", "6:29", "option 'virtual' on an axis that is nowhere 'stage'", "Take 'virtual' out.")],
    ),
    (
        HEAD + "  expert: idle\nmove: {attention: ulyses, moe: rings}\n",
        [
            ("SW111", "7:19", "unknown value 'ulyses'", "Write 'ulysses'."),
            ("SW111", "7:32", "unknown value 'rings'", "Write 'ring'."),
        ],
    ),
    (
        HEAD + "  expert: idle\nrules: {attention: {heds: [fsdp], embed: [fsdq, fsdp, fsdp]}}\n",
        [
            ("SW111", "7:21", "unknown key 'heds'", "Write 'heads'."),
            ("SW111", "7:43", "unknown mesh axis 'fsdq'", "Write 'fsdp'."),
            ("SW102", "7:55", "axis 'fsdp' twice", "Write 'fsdp' once."),
        ],
    ),
]


@pytest.mark.parametrize(
    ("text", "expected"), FAULTS, ids=[text.split("\n")[-2 if "\n" in text else 0] for text, _ in FAULTS]
)
def test_every_fault_is_reported_at_its_place_with_its_fix(text, expected):
    found = faults(text)
    assert sorted((f.code, f"{f.position.line}:{f.position.column}", f.found, f.fix) for f in found) == sorted(expected)
    assert all(f.severity == "error" and f.needed for f in found)


@pytest.mark.parametrize("text", [text for text, _ in FAULTS])
def test_a_suggested_word_fixes_the_fault_at_its_place(text):
    for finding in faults(text):
        offered = re.fullmatch(r"Write '(\w+)'\.", finding.fix)
        if offered is None:
            continue
        lines = text.split("\n")
        line, column = finding.position.line - 1, finding.position.column - 1
        old = re.match(r"\w+", lines[line][column:]).group()
        lines[line] = lines[line][:column] + offered[1] + lines[line][column + len(old) :]
        try:
            left = read("\n".join(lines)) and ()
        except FindingsError as error:
            left = error.findings
        assert finding.found not in [f.found for f in left]


def test_all_faults_are_reported_at_once():
    codes = [f.code for f in faults("mesh: {a: two}\nroles: {b: data}\nmove: {moe: x}\n")]
    assert sorted(codes) == ["SW106", "SW111", "SW111", "SW120", "SW120"]
