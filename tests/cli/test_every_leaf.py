"""Every leaf of a lock and of a plan, edited one at a time, or taken away: `check` and `diff` say so, or refuse the file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.cli.reviewing import checked
from shardwright.cli.reviewing.locked_request import request_of_lock
from shardwright.cli.typed.request import planned
from shardwright.locks.difference import difference
from shardwright.locks.lock import Lock, read_lock
from shardwright.locks.plan_fields import NOT_COMPARED
from shardwright.locks.saved_plan import NotSavedError, check_plan

LAYOUT = """\
name: mine
mesh: {fsdp: {size: 2, link: dcn}, context: 2, expert: 2}
roles:
  fsdp:    {elsewhere: fsdp, weights: [embed, mlp]}
  context: {elsewhere: context, moe: context}
  expert:  {elsewhere: tensor, residual: tensor, moe: expert, sequence_parallel: true}
move: {attention: ring, moe: auto}
rules: {attention: {head_dim: []}}
"""
LOCKING = ["--layout", "mine.yaml", "--set", "num_layers=2", "capacity_factor=2.0", "--length", "64", "--batch", "8"]
ALSO = ["--load-balance", "--expert-buffer", "1.5", "--chips", "cpu:8", "--dtype", "float32"]
LOCK = Path("a.lock.json")

PROGRAM: Mapping[str, Any] = {
    "target": "cpu:8",
    "versions": {"jax": "0.10.2"},
    "collectives": [
        {
            "component": "attention",
            "phase": "forward",
            "kind": "permute",
            "axes": ["context"],
            "bytes_per_device": 4096,
            "count_per_step": 2,
            "dtypes": ["float32"],
            "in_loop": True,
            "ragged": True,
        },
    ],
    "memory": dict.fromkeys(
        ("arguments_bytes", "temporaries_bytes", "output_bytes", "aliased_bytes", "peak_bytes"), 1 << 20
    ),
}

SEED, ROWS = 20, 3
LISTS = ("tensors", "collectives", "findings")

SILENT: Mapping[str, str] = {
    "layout": "a name",
    "declaration.name": "a name",
    "compiled.versions.jax": "what compiled the same program",
    **dict.fromkeys(
        (f"training_only.{name}" for name in ("key", "value", "part")), "what no engine computes: it places nothing"
    ),
}
"""Leaves of a lock whose changes are not reported, and why."""

MEANS_THE_SAME: Mapping[str, str] = {
    "request.devices": "as many as the mesh has, given or not",
    "request.expert_buffer": "a buffer for the largest need, however it is written",
    "declaration.roles": "a role of a component that the model lacks: reported as declared in another form",
    "declaration.rules": "the same axes of a dim, by a role or by a rule: reported as declared in another form",
}
"""Places where a value can ask for what another asks for. `check` plans it, and it is the same."""

MAY_LACK: Mapping[str, str] = {
    **SILENT,
    **dict.fromkeys(("dtype", "load_balanced", "num_parameters"), "a file of an older version may lack it"),
    "request.set.capacity_factor": "the model's own value, given or not",
    "request.devices": "none were given, as it says",
    "request.expert_buffer": "a buffer for the largest need, however it is written",
    "request.by_default": "what `lock` writes where the option is given, with the value that it has by default",
    "declaration.name": "a name",
    "training_only": "what no engine computes: it places nothing",
    "declaration.roles.fsdp.weights": "the storage dims are the same without it: reported as declared in another form",
    "compiled": "what `lock` writes without --compiled",
}
"""Parts of a lock that can be removed without a report, and why."""

MAY_HAVE: Mapping[str, str] = {
    "mesh": "an axis of size 1 shards nothing",
    "compiled.versions": "what compiled the same program",
}
"""Where something can be added to what `lock` wrote without a report, and why."""


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield path
    for key, item in inside:
        yield from leaves(item, (*path, key))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edited(value: Any, path: tuple[str | int, ...], leaf: Any) -> Any:
    copy = deepcopy(value)
    at(copy, path[:-1])[path[-1]] = leaf
    return copy


def drawn(old: Any, like: list[Any], draw: random.Random) -> Any:
    """Another value: of the same kind more often than not, as a hand that slips would leave it."""
    others: list[Any]
    if isinstance(old, bool):
        others = [not old, not old, "true", None, 2]
    elif isinstance(old, int):
        others = [old + 1, max(0, old - 1) if old else 3, old * 2 + 1, -old - 1, 0.5, str(old), None, [old]]
    elif isinstance(old, float):
        others = [old * 2, "x", None, True]
    elif isinstance(old, str):
        others = [other for other in like if isinstance(other, str)] + [f"{old}x", old.upper(), "", 5, None, [old]]
    else:
        others = [7, "x", True, [1], {"a": 1}, -1, 0.25]
    others = [other for other in others if other != old or type(other) is not type(old)]
    return draw.choice(others)


def place(path: tuple[str | int, ...]) -> str:
    return ".".join(str(key) for key in path if isinstance(key, str))


def values_of_a_field(value: Any) -> Mapping[str, list[Any]]:
    """What stands in leaves of one name, to draw from."""
    found: dict[str, dict[str, Any]] = {}
    for path in leaves(value):
        found.setdefault(place(path), {})[json.dumps(at(value, path))] = at(value, path)
    return {name: list(values.values()) for name, values in found.items()}


@pytest.fixture
def locked(tmp_path: Path, monkeypatch, capsys) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    assert main(["lock", "mixtral-test", *LOCKING, *ALSO, "--out", str(LOCK)]) == 0, capsys.readouterr()
    capsys.readouterr()
    return {**json.loads(LOCK.read_text(encoding="utf-8")), "compiled": deepcopy(dict(PROGRAM))}


@pytest.fixture
def planned_once(monkeypatch) -> None:
    """Equal requests are planned once."""
    requests: dict[str, Any] = {}
    plans: dict[int, Any] = {}

    def asked_once(lock: Lock, path: Path) -> Any:
        key = repr(lock.request)
        if key not in requests:
            requests[key] = request_of_lock(lock, path)
        return requests[key]

    def planned_once(question: Any) -> Any:
        if id(question) not in plans:
            plans[id(question)] = planned(question)
        return plans[id(question)]

    monkeypatch.setattr(checked, "request_of_lock", asked_once)
    monkeypatch.setattr(checked, "planned", planned_once)


def outcome(lock: Any, monkeypatch) -> tuple[int, bool]:
    """The exit code of `check`, and whether it says that a layout is declared in other words."""
    monkeypatch.setattr(checked, "read_saved_lock", lambda path: ("", read_lock(lock, str(path))))
    found = checked.check(LOCK, compiler=compiled)
    return found.exit_code, bool(found.declared)


def compiled(question: Any, plan: Any, target: str) -> Mapping[str, Any]:
    del question, plan
    return {**deepcopy(dict(PROGRAM)), "target": target}


@pytest.mark.usefixtures("planned_once")
def test_every_leaf_of_a_lock(locked, monkeypatch) -> None:
    assert outcome(locked, monkeypatch) == (0, False)
    draw, likes = random.Random(SEED), values_of_a_field(locked)
    silent: dict[str, Any] = {}
    for path in some_leaves(locked, draw):
        value = drawn(at(locked, path), likes[place(path)], draw)
        code, reported = outcome(edited(locked, path, value), monkeypatch)
        if code == 0:
            silent[place(path)] = (at(locked, path), value, reported)
    same = {name for name in silent if any(name.startswith(known) for known in MEANS_THE_SAME)}
    assert set(silent) - same <= set(SILENT), silent
    assert all(silent[name][2] for name in same if name.startswith("declaration")), silent


def parts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Everything in a lock, leaf or not: of each field one, and of rows of tensors one for weights and one for activations."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from parts(item, (*path, key))


def one_of_each(value: Any) -> list[tuple[str | int, ...]]:
    found: dict[tuple[object, ...], tuple[str | int, ...]] = {}
    for path in parts(value):
        kind = at(value, (*path[:2], "kind")) if path[0] == "tensors" and len(path) > 1 else None
        # The last of them, so that the test does not only cover checks of the first row.
        found[tuple(key if isinstance(key, str) else 0 for key in path), kind] = path
    return list(found.values())


@pytest.mark.usefixtures("planned_once")
def test_everything_in_a_lock_taken_away(locked, monkeypatch) -> None:
    silent: dict[str, Any] = {}
    for path in one_of_each(locked):
        less = deepcopy(locked)
        *above, last = path
        del at(less, tuple(above))[last]
        code, reported = outcome(less, monkeypatch)
        if code == 0 and not reported:
            silent[place(path)] = path
    assert set(silent) <= set(MAY_LACK), silent


@pytest.mark.usefixtures("planned_once")
def test_everything_in_a_lock_with_something_added(locked, monkeypatch) -> None:
    silent: dict[str, Any] = {}
    for path in ((), *one_of_each(locked)):
        if not isinstance(at(locked, path), dict):
            continue
        for name, value in (
            ("foo", "x"),
            ("foo", 1),
            ("seconds", 1.0),
            ("asked", 1),
            ("costs", {"a": 1}),
            ("shard_group", ["x"]),
        ):
            more = deepcopy(locked)
            at(more, path)[name] = value
            code, reported = outcome(more, monkeypatch)
            if code == 0 and not reported:
                silent[place(path)] = (path, name, value)
    assert set(silent) <= set(MAY_HAVE), silent


def test_the_message_for_a_row_that_lock_never_writes(locked, capsys) -> None:
    del locked
    whole = json.loads(LOCK.read_text(encoding="utf-8"))
    rows = whole["tensors"]
    activations = [number for number, row in enumerate(rows) if row["kind"] == "activation"]
    name = whole["collectives"][2]["tensors"][0]

    def without_shape(lock: Any) -> None:
        del lock["tensors"][activations[3]]["shape"]

    cases = {
        f"'tensors' {activations[3]} has no 'shape', and 'tensors' {activations[0]} has one": without_shape,
        "'tensors' 4 has 'foo', which no lock holds": lambda lock: lock["tensors"][4].update(foo=1),
        f"'tensors' of 'collectives' 2 has '{name}' 2 times, and may have it once": lambda lock: lock["collectives"][2][
            "tensors"
        ].append(name),
        "'move' of 'declaration' has 'foo', which no layout declares": lambda lock: lock["declaration"]["move"].update(
            foo="ring"
        ),
    }
    for why, change in cases.items():
        edited_lock = deepcopy(whole)
        change(edited_lock)
        LOCK.write_text(json.dumps(edited_lock), encoding="utf-8")
        assert main(["check", str(LOCK)]) == 2
        assert capsys.readouterr() == (
            "",
            f"shardwright: a.lock.json: this is not a lock: {why}. "
            f"Write one with: shardwright lock MODEL --layout NAME|FILE --out FILE\n",
        )
    LOCK.write_text(json.dumps({key: value for key, value in whole.items() if key != "choices"}), encoding="utf-8")
    assert main(["check", str(LOCK)]) == 1
    assert 'choices is [{"chosen": "ring", "what": "move.moe"}], and was []' in " ".join(
        capsys.readouterr().out.split()
    )
    roles = deepcopy(whole)
    del roles["declaration"]["roles"]["context"]
    LOCK.write_text(json.dumps(roles), encoding="utf-8")
    assert main(["check", str(LOCK)]) == 2
    assert "a.lock.json: this lock disagrees with itself: " in capsys.readouterr().err


def some_leaves(value: Any, draw: random.Random) -> list[tuple[str | int, ...]]:
    """All of them; of tensors, collectives and findings those of a few rows, and of every field at least one."""
    rows = {
        key: set(draw.sample(range(len(part)), min(ROWS, len(part)))) for key, part in value.items() if key in LISTS
    }
    kept = [path for path in leaves(value) if path[0] not in rows or path[1] in rows[str(path[0])]]
    there = {place(path) for path in kept}
    return kept + list({place(path): path for path in leaves(value) if place(path) not in there}.values())


@pytest.mark.usefixtures("locked")
def test_every_leaf_of_a_plan(capsys) -> None:
    """`diff` of a plan as it was written and with one leaf edited."""
    assert main(["plan", "mixtral-test", *LOCKING, *ALSO, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    nothing = difference(plan, plan).to_json()
    assert not nothing["moved"]
    draw, likes = random.Random(SEED), values_of_a_field(plan)
    silent: dict[str, Any] = {}
    for path in some_leaves(plan, draw):
        value = drawn(at(plan, path), likes[place(path)], draw)
        try:
            if difference(plan, check_plan(edited(plan, path, value))).to_json() == nothing:
                silent[place(path)] = (at(plan, path), value)
        except NotSavedError:
            continue
    unseen = {name: pair for name, pair in silent.items() if not any(name.startswith(part) for part in NOT_COMPARED)}
    assert not unseen


def test_the_message_for_an_edited_field(locked, capsys) -> None:
    del locked
    whole = json.loads(LOCK.read_text(encoding="utf-8"))
    LOCK.write_text(json.dumps({**whole, "dtype": "bfloat16"}), encoding="utf-8")
    assert main(["check", str(LOCK)]) == 1
    reported = " ".join(capsys.readouterr().out.split())
    assert "found 1 field moved, since a.lock.json was written" in reported
    assert 'dtype is "float32", and was "bfloat16"' in reported
    roles = deepcopy(whole["declaration"])
    roles["roles"]["context"]["attention"] = "fsdp"
    LOCK.write_text(json.dumps({**whole, "declaration": roles}), encoding="utf-8")
    assert main(["check", str(LOCK)]) == 2
    assert capsys.readouterr().err == (
        "shardwright: a.lock.json: this lock disagrees with itself: its tensors are those of the layout as it is, and its "
        "'declaration' would place them otherwise: the role of 'context' in attention is 'fsdp' there. Something else has "
        "changed it. Write it anew: shardwright check --update a.lock.json\n"
    )
    assert main(["check", "--update", str(LOCK)]) == 0
    assert json.loads(LOCK.read_text(encoding="utf-8")) == whole
    capsys.readouterr()
    twice = {**whole, "tensors": [*whole["tensors"], whole["tensors"][3]]}
    LOCK.write_text(json.dumps(twice), encoding="utf-8")
    assert main(["check", str(LOCK)]) == 2
    number, name = len(whole["tensors"]), whole["tensors"][3]["name"]
    assert capsys.readouterr().err.startswith(
        f"shardwright: a.lock.json: this is not a lock: 'tensors' {number} is '{name}', which 'tensors' 3 is already. "
    )
