"""`shardwright diff`: two layouts under the same options, or plans and locks from files."""

from __future__ import annotations

import json
import re

import pytest

from shardwright.cli.main import main


def diff(capsys, *arguments: str) -> dict:
    assert main(["diff", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def message(capsys, *arguments: str) -> str:
    assert main(["diff", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.fixture
def saved(capsys, tmp_path):
    """A plan in a file, as `plan --json > FILE` makes it."""

    def save(name: str, *arguments: str) -> str:
        assert main(["plan", *arguments, "--json"]) == 0
        path = tmp_path / name
        path.write_text(capsys.readouterr().out, encoding="utf-8")
        return str(path)

    return save


def test_ep_against_ep_as_cp(capsys):
    assert main(["diff", "ep", "ep-as-cp", "--model", "deepseek3-test"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "    stream            - batch/fsdp/expert length embed" in out
    assert "                      + batch/fsdp length/expert embed" in out


def test_a_layout_does_not_differ_from_itself(capsys):
    assert main(["diff", "ep", "ep", "--model", "deepseek3-test"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"Nothing moves: \d+ tensors and all collectives are the same\.", last)


def test_two_files_are_compared_as_the_layouts_were(capsys, saved):
    before = saved("a.json", "deepseek3-test", "--layout", "ep")
    after = saved("b.json", "deepseek3-test", "--layout", "ep-as-cp")
    from_files = diff(capsys, before, after)
    assert from_files == diff(capsys, "ep", "ep-as-cp", "--model", "deepseek3-test")
    assert from_files == diff(capsys, before, "ep-as-cp", "--model", "deepseek3-test")


def test_the_options_are_common(capsys):
    options = ["--batch", "16", "--length", "64", "--engine", "torch", "--set", "num_layers=2"]
    data = diff(capsys, "fsdp", "hsdp", "--model", "llama3-test", *options)
    for side in ("before", "after"):
        assert (data[side]["batch"], data[side]["length"], data[side]["engine"]) == (16, 64, "torch")
    assert {row["num"] for row in data["tensors"] if row["name"].startswith("layers.attention")} == {2}


def test_each_side_takes_the_common_sizes_that_it_has_an_axis_for(capsys):
    data = diff(capsys, "hsdp", "ep", "--model", "deepseek3-test", "--mesh", "fsdp=2,expert=2", "--devices", "4")
    assert data["before"]["mesh"] == {"data": 2, "fsdp": 2}
    assert data["after"]["mesh"] == {"data": 1, "fsdp": 2, "expert": 2}


def test_a_side_may_have_sizes_of_its_own(capsys):
    data = diff(capsys, "hsdp:data=4,fsdp=2", "ep:expert=2", "--model", "deepseek3-test", "--devices", "8")
    assert data["before"]["mesh"] == {"data": 4, "fsdp": 2}
    assert data["after"]["mesh"] == {"data": 1, "fsdp": 4, "expert": 2}


def test_different_numbers_of_devices_are_pointed_out(capsys):
    assert main(["diff", "fsdp:fsdp=4", "fsdp:fsdp=8", "--model", "llama3-test"]) == 0
    assert "A has 4 devices, B 8: bytes per device are not directly comparable.\n" in capsys.readouterr().out


def test_a_plan_with_errors_is_compared_and_pointed_out(capsys):
    assert main(["diff", "fsdp", "fsdp-tp:fsdp=1,tensor=8", "--model", "deepseek3-test"]) == 0
    assert "B has findings of severity error (1): `shardwright plan` shows them." in capsys.readouterr().out


def test_a_layout_needs_a_model(capsys):
    assert message(capsys, "ep", "ep-as-cp") == (
        "shardwright: 'ep' is a layout, and a layout is planned for a model. Give one: --model deepseek3-test. "
        "(A plan that was saved with --json is a file that ends in .json.)\n"
    )


def test_an_axis_that_neither_has_is_refused(capsys):
    text = message(capsys, "fsdp", "hsdp", "--model", "llama3-test", "--mesh", "fdsp=2")
    assert text == "shardwright: --mesh: no layout here has a mesh axis 'fdsp'. Did you mean 'fsdp'?\n"


def test_sizes_of_a_side_that_cannot_be_read(capsys):
    text = message(capsys, "ep:expert=two", "hsdp", "--model", "deepseek3-test")
    assert text.startswith(
        "shardwright: 'ep:expert=two': 'two' is not a whole number.\n    expert=two\n           ^^^\n"
    )


def test_the_side_that_has_no_plan_is_named(capsys):
    arguments = ["fsdp", "fsdp-tp", "--model", "llama3-test", "--mesh", "fsdp=4,tensor=2", "--devices", "8"]
    assert main(["diff", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "shardwright: 'fsdp' has no plan, for the reason below. "
        "Give axis sizes for it alone after its name, as in fsdp:AXIS=SIZE,...\n\nerror SW106: "
    )
    assert main(["diff", "fsdp:fsdp=8", *arguments[1:]]) == 0


@pytest.fixture
def locked(capsys, tmp_path):
    """A lock in a file."""

    def lock(name: str, *arguments: str) -> str:
        assert main(["lock", *arguments, "--out", str(tmp_path / name)]) == 0
        capsys.readouterr()
        return str(tmp_path / name)

    return lock


def test_locks_are_compared_as_the_layouts_were(capsys, locked, saved):
    before = locked("a.json", "deepseek3-test", "--layout", "ep")
    after = locked("b.lock", "deepseek3-test", "--layout", "ep-as-cp")
    layouts = diff(capsys, "ep", "ep-as-cp", "--model", "deepseek3-test")
    for sides in (
        (before, after),
        (before, "ep-as-cp", "--model", "deepseek3-test"),
        (saved("c.json", "deepseek3-test", "--layout", "ep"), after),
    ):
        # What is asked is in a lock's request, and in a plan's roles.
        found = diff(capsys, *sides)
        assert {**found, "said": []} == {**layouts, "said": []}


def test_a_layout_compared_with_a_lock_takes_its_model_and_options(capsys, locked):
    options = ["--length", "64", "--set", "num_layers=2", "--mesh", "fsdp=2,expert=2", "--move", "moe=ring"]
    lock = locked("a.json", "deepseek3-test", "--layout", "ep", *options)
    data = diff(capsys, lock, "ep")
    assert data["before"] == data["after"]
    # The lock's ring is not the layout's own way of moving tokens.
    assert {row["component"] for row in data["collectives"]} == {"moe"}
    data = diff(capsys, "ep", lock, "--length", "32", "--move", "moe=ring")
    assert (data["before"]["length"], data["after"]["length"]) == (32, 64)
    data = diff(capsys, lock, "fsdp", "--model", "llama3-test")
    assert (data["after"]["model"], data["after"]["length"]) == ("llama3-test", 128)


def test_a_lock_of_another_format_cannot_be_compared(capsys, locked, tmp_path):
    lock = tmp_path / locked("a.json", "llama3-test")
    lock.write_text(lock.read_text(encoding="utf-8").replace('"shardwright_lock": 1', '"shardwright_lock": 3'), "utf-8")
    text = message(capsys, str(lock), str(lock))
    assert text.startswith(
        f"shardwright: {lock}: a lock of format 3, and this shardwright reads format 1. Write it anew"
    )


HOW = "Write one with: shardwright plan MODEL --json > plan.json"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: [], "the plan is not an object"),
        (lambda plan: plan.pop("tensors") and plan, "'tensors' is not a list"),
        (lambda plan: {**plan, "mesh": {"fsdp": "2"}}, "'fsdp' of 'mesh' is not a whole number"),
        (lambda plan: {**plan, "mesh": None}, "'mesh' is not an object"),
        (lambda plan: {**plan, "memory": {}}, "'memory' has no 'weights_bytes'"),
        (lambda plan: {**plan, "links": {"fsdp": "wifi"}}, "'fsdp' of 'links' is not one of ici, dcn"),
        (lambda plan: {**plan, "batch": True}, "'batch' of the plan is not a whole number"),
        (lambda plan: {**plan, "tensors": [5]}, "'tensors' 0 is not an object"),
        (lambda plan: {**plan, "tensors": [{**plan["tensors"][0], "name": 1}]}, "'name' of 'tensors' 0 is not a text"),
        (
            lambda plan: {**plan, "tensors": [{**plan["tensors"][0], "at_rest": 1}]},
            "'at_rest' of 'tensors' 0 is not a text",
        ),
        (lambda plan: {**plan, "findings": [{}]}, "'findings' 0 has no 'severity'"),
        (
            lambda plan: {**plan, "collectives": [{**plan["collectives"][0], "axes": "fsdp"}]},
            "'axes' of 'collectives' 0 is not a list of texts",
        ),
        (
            lambda plan: {**plan, "tensors": [{**plan["tensors"][0], "component": "head"}]},
            "'component' of 'tensors' 0 is 'head', which is no component",
        ),
        (
            lambda plan: {**plan, "collectives": [{**plan["collectives"][0], "component": "head"}]},
            "'component' of 'collectives' 0 is 'head', which is no component",
        ),
    ],
)
def test_a_file_that_is_no_plan(change, why, capsys, saved, tmp_path):
    plan = json.loads((tmp_path / saved("a.json", "llama3-test")).read_text(encoding="utf-8"))
    path = tmp_path / "b.json"
    path.write_text(json.dumps(change(plan)), encoding="utf-8")
    assert message(capsys, str(path), str(path)) == f"shardwright: {path}: this is not a plan: {why}. {HOW}\n"


def test_a_file_that_is_no_json_has_its_place_in_the_message(capsys, tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"model": }', encoding="utf-8")
    assert message(capsys, str(path), str(path)).startswith(f"shardwright: {path}:1:11: ")
    path.unlink()
    assert message(capsys, str(path), str(path)).startswith(f"shardwright: {path}: no such file")


def test_memory_is_the_plans_where_the_chips_choose_the_stages(capsys, saved):
    """The fastest stages depend on the chips: `plan` and `diff` have the same."""
    options = [
        "--mesh",
        "stage=4,fsdp=4",
        "--chips",
        "a100:2x8",
        "--batch",
        "128",
        "--microbatches",
        "4",
        "--engine",
        "torch",
    ]
    with open(saved("pp.json", "llama3-test", "--layout", "pp", *options), encoding="utf-8") as file:
        planned = json.load(file)
    same = diff(
        capsys, "pp", saved("pp.json", "llama3-test", "--layout", "pp", *options), "--model", "llama3-test", *options
    )
    total = planned["memory"]["total_bytes_per_device"]
    assert same["memory"]["total_bytes_per_device"] == {"before": total, "after": total}
