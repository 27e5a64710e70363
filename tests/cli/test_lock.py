"""`shardwright lock`: what the file holds, what it is called, and what it is never written over."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from shardwright.cli.reviewing import lock as lock_verb
from shardwright.core.findings.errors import InputError
from tests.cli.locks import LAYOUT, LOCK, LOCKING, change, typing

BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(LAYOUT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return typing(capsys)


def held(name: str = LOCK) -> dict:
    return json.loads(Path(name).read_text(encoding="utf-8"))


def test_it_says_what_it_wrote_and_how_to_check_it(typed):
    code, out, err = typed(*LOCKING)
    assert (code, err) == (0, "")
    assert out == (
        "mixtral-test.mine.lock.json: written\n"
        "  holds        56 tensors and 24 collectives of mixtral-test under mine\n"
        "  warning      training here lacks the auxiliary loss that balances the experts: nothing does here ('router_aux_loss_coef': "
        "0.02 in the published configuration)\n"
        "  by default   --batch --length --engine --dtype --weights-dtype --moments-dtype --remat --microbatches\n"
        "  to check it  shardwright check mixtral-test.mine.lock.json\n"
    )
    assert typed(*LOCKING)[1].startswith("mixtral-test.mine.lock.json: is as it was\n")
    assert typed(*LOCKING, "--batch", "16")[1].startswith("mixtral-test.mine.lock.json: written anew\n")


def share(row: dict, notation: str, mesh: dict[str, int]) -> int:
    """Elements of a tensor on one device, by a spec's own words: the last ones, where layers are stacked in front."""
    words = notation.split()[-len(row["shape"]) :]
    degrees = [math.prod(mesh[axis] for axis in word.split("/")[1:]) for word in words]
    return math.prod(math.ceil(size / degree) for size, degree in zip(row["shape"], degrees, strict=True))


def test_bytes_in_the_file_are_those_of_its_own_specs(typed):
    typed(*LOCKING, "--weights-dtype", "bfloat16")
    lock = held()
    for row in lock["tensors"]:
        rests = row.get("at_rest", row["in_use"])
        assert row["bytes_per_device"] == share(row, rests, lock["mesh"]) * BYTES[row["dtype"]], row["name"]
    weights = [row for row in lock["tensors"] if row["kind"] == "weight"]
    assert lock["memory"]["weights_bytes"] == sum(row["bytes_per_device"] * row["num"] for row in weights)
    assert sum(math.prod(row["shape"]) * row["num"] for row in weights) == lock["num_parameters"]


@pytest.mark.parametrize(("kind", "phase"), [("all-gather", "forward"), ("reduce-scatter", "backward")])
def test_what_weights_send_follows_from_their_specs_at_rest_and_in_use(kind, phase, typed):
    typed(*LOCKING, "--dtype", "bfloat16")
    lock = held()
    weights = {row["name"]: row for row in lock["tensors"] if row["kind"] == "weight"}
    sent = sum(
        row["bytes_per_device"] * row["count_per_step"]
        for row in lock["collectives"]
        if (row["kind"], row["phase"]) == (kind, phase) and set(row["tensors"]) <= set(weights)
    )
    # Weights are gathered in the computation's dtype, the router's in float32; gradients are scattered in the weights'.
    narrow = BYTES["bfloat16" if kind == "all-gather" else "float32"]
    width = {name: 4 if row["component"] == "router" else narrow for name, row in weights.items()}
    moving = [row for row in weights.values() if row["at_rest"] != row["in_use"]]
    assert len(moving) > 5
    assert sent == sum(share(row, row["in_use"], lock["mesh"]) * row["num"] * width[row["name"]] for row in moving)


def test_a_tensor_and_a_collective_are_a_line_each(typed):
    typed(*LOCKING)
    lock, lines = held(), Path(LOCK).read_text(encoding="utf-8").splitlines()
    read = [json.loads(line.strip().rstrip(",")) for line in lines if line.startswith("  {")]
    assert read == [*lock["training_only"], *lock["tensors"], *lock["collectives"]]
    assert [line for line in lines if line.startswith('   "expert": {"input"')]


def test_every_option_is_in_the_request(typed):
    options = [
        "--mesh",
        "fsdp=4,expert=2",
        "--move",
        "moe=ring",
        "--batch",
        "16",
        "--length",
        "64",
        "--dtype",
        "float32",
    ]
    options += [
        "--chips",
        "h100:1x8",
        "--remat",
        "dots",
        "--microbatches",
        "2",
        "--expert-buffer",
        "2",
        "--load-balance",
        "--hops",
        "two",
    ]
    options += [
        "--weights-dtype",
        "bfloat16",
        "--moments-dtype",
        "bfloat16,float32",
        "--engine",
        "jax",
        "--devices",
        "8",
    ]
    code, _, err = typed(*LOCKING, *options)
    assert (code, err) == (0, "")
    assert held()["request"] == {
        "model": "mixtral-test",
        "set": {"num_layers": "2"},
        "layout": "./mine.yaml",
        "mesh": {"fsdp": 4, "expert": 2},
        "devices": 8,
        "move": {"moe": "ring"},
        "chips": "h100:1x8",
        "engine": "jax",
        "batch": 16,
        "length": 64,
        "dtype": "float32",
        "weights_dtype": "bfloat16",
        "moments_dtype": "bfloat16,float32",
        "remat": "dots",
        "microbatches": 2,
        "hops": "two",
        "expert_buffer": 2,
        "load_balance": True,
        "by_default": [],
    }


def test_a_preset_is_named_and_has_both_what_was_declared_and_what_auto_chose(typed):
    assert typed("lock", "mixtral-test", "--layout", "ep", "--move", "moe=auto")[0] == 0
    lock = held("mixtral-test.ep.lock.json")
    assert (lock["request"]["layout"], lock["request"]["move"]) == ("ep", {"moe": "auto"})
    assert lock["declaration"]["move"]["moe"] == "auto"
    assert lock["choices"] == [{"what": "move.moe", "chosen": "all-to-all"}]


def test_json_is_the_file(typed):
    code, out, _ = typed(*LOCKING, "--json")
    assert code == 0
    assert json.loads(out) == {"file": LOCK, "written": True, "lock": held()}


def test_out_is_a_file_or_a_folder(typed, tmp_path):
    (tmp_path / "locks").mkdir()
    assert typed(*LOCKING, "--out", "locks")[0] == 0
    assert held(f"locks/{LOCK}")["request"]["layout"] == "../mine.yaml"
    assert typed(*LOCKING, "--out", "locks/of mine, 100%:\n.txt")[0] == 0
    assert typed("check", "locks/of mine, 100%:\n.txt")[0] == 0


def test_a_plan_with_an_error_is_not_locked(typed):
    code, out, err = typed("lock", "mixtral-test", "--layout", "fsdp-tp", "--mesh", "fsdp=1,tensor=8")
    assert (code, out) == (1, "")
    assert "error SW107: " in err
    assert os.listdir() == ["mine.yaml"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("name: mine\n", f"{LOCK}:1:1: not JSON: expecting value.\n    name: mine\n    ^"),
        ('{"model": "llama3-test"}', "it is not a lock."),
        ("[]", "it is not a lock."),
        ("", f"{LOCK}: the file is empty; it should hold JSON."),
    ],
)
def test_nothing_but_a_lock_is_written_over(content, why, typed):
    Path(LOCK).write_text(content, encoding="utf-8")
    assert typed(*LOCKING) == (
        2,
        "",
        f"shardwright: {LOCK}: a file of this name exists and was not overwritten. Delete it, or give another name with --out. "
        f"About it: {why}\n",
    )
    assert Path(LOCK).read_text(encoding="utf-8") == content


def test_a_lock_of_another_format_is_written_anew(typed):
    typed(*LOCKING)
    change(Path(LOCK), lambda lock: lock.update(shardwright_lock=99))
    assert typed(*LOCKING)[1].startswith(f"{LOCK}: written anew\n")
    assert typed("check", LOCK)[0] == 0


def test_a_folder_that_is_not_there_or_may_not_be_written(typed, monkeypatch):
    assert typed(*LOCKING, "--out", "there/x.json") == (
        2,
        "",
        "shardwright: there/x.json: cannot be written: the folder there does not exist.\n",
    )
    assert typed(*LOCKING, "--out", "mine.yaml/x.json") == (
        2,
        "",
        "shardwright: mine.yaml/x.json: cannot be written: Not a directory. Nothing was changed.\n",
    )

    def refuse(path, _):
        raise InputError(f"{path}: cannot be written: Permission denied. Nothing was changed.")

    monkeypatch.setattr(lock_verb, "replace_text", refuse)
    assert typed(*LOCKING)[0] == 2


def test_names_of_layouts_make_names_of_files(typed):
    Path("mine.yaml").write_text(LAYOUT.replace("name: mine", 'name: "größe 4/8: ürgend"'), encoding="utf-8")
    assert typed(*LOCKING)[0] == 0
    (written,) = Path().glob("*.lock.json")
    assert written.name == "mixtral-test.gr-e-4-8-rgend.lock.json"
    assert '"layout": "größe 4/8: ürgend"' in written.read_text(encoding="utf-8")
