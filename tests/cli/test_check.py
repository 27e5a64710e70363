"""`shardwright check`: it reports what moved and nothing else, and a file that cannot be checked is one message."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli.typed import request
from shardwright.models import build
from tests.cli.locks import LAYOUT, LOCK, LOCKING, MOVED, change, typing


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    """A folder with a layout and its lock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    typed = typing(capsys)
    assert typed(*LOCKING)[0] == 0
    return typed


STANDS = "nothing moved, 56 tensors and all collectives are as they were locked"


def test_nothing_moved(typed):
    before = Path(LOCK).read_bytes()
    assert typed("check") == (0, f"{LOCK}: {STANDS}\n", "")
    assert typed("check", "--update") == (0, f"{LOCK}: {STANDS}\n", "")
    assert Path(LOCK).read_bytes() == before


GOLDEN = """\
error SW601: A locked layout changes only together with its lock.
  where  mine.yaml:5:3: mixtral-test under mine
  found  40 activations, 3 collectives and the memory of a device moved, since mixtral-test.mine.lock.json was written
         the role of 'expert' in input, embedding, residual, attention, mlp, router and logits is 'fsdp', and was 'context'
         attention.keys_attended: batch/fsdp kv_length kv_heads head_dim -> batch/fsdp/expert kv_length kv_heads head_dim, 128 KiB -> 32.0 KiB
         attention.values_attended: batch/fsdp kv_length kv_heads head_dim -> batch/fsdp/expert kv_length kv_heads head_dim, 128 KiB -> 32.0 KiB
         attention.kv_positions: batch/fsdp kv_length -> batch/fsdp/expert kv_length, 2.00 KiB -> 512 B
         attention.kv_segments: batch/fsdp kv_length -> batch/fsdp/expert kv_length, 2.00 KiB -> 512 B
         input.tokens: batch/fsdp length/expert -> batch/fsdp/expert length, 512 B
         and 35 more tensors
  needed what mixtral-test.mine.lock.json holds, or a lock of the present plan
  fix    shardwright check --update mixtral-test.mine.lock.json
  cost   of a device: 12.7 MiB -> 11.2 MiB sent or received in a step, x0.881; 13.1 MiB -> 12.6 MiB memory, x0.961
"""


def test_a_moved_layout_is_reported_with_place_table_and_command(typed):
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    code, out, err = typed("check", LOCK)
    assert (code, err) == (1, "")
    assert out.startswith(f"{LOCK}: moved\n\nlocked  mixtral-test under mine\n        fsdp 2 x expert 4; ")
    assert "    stream            - batch/fsdp length/expert embed" in out
    assert "                      + batch/fsdp/expert length embed" in out
    assert out.endswith(f"\n{GOLDEN}")


def test_json_has_everything_that_moved(typed):
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    code, out, _ = typed("check", "--json")
    assert code == 1
    reported = json.loads(out)
    (one,) = reported["checked"]
    assert (one["file"], one["exit_code"], one["written"]) == (LOCK, 1, False)
    rows = {row["name"]: row for row in one["difference"]["tensors"]}
    # Half of 8 rows of 128 tokens of 4 KV heads of 16 numbers in float32, or an eighth of them.
    tokens = 8 * 128 * 4 * 16 * 4
    keys = rows["attention.keys_attended"]["bytes_per_device"]
    assert (keys["before"], keys["after"]) == (tokens // 2, tokens // 8)
    assert [finding["code"] for finding in reported["findings"]] == ["SW601"]
    assert reported["findings"][0]["position"] == {"source": "mine.yaml", "line": 5, "column": 3}


def test_an_updated_lock_passes(typed):
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    code, out, _ = typed("check", "--update")
    assert code == 0
    assert out.startswith(f"{LOCK}: moved; written anew\n")
    assert typed("check")[0] == 0
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    assert typed("check")[0] == 1


def test_an_update_is_what_lock_writes(typed):
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    typed("check", "--update")
    updated = Path(LOCK).read_bytes()
    typed(*LOCKING)
    assert Path(LOCK).read_bytes() == updated


@pytest.mark.parametrize(
    ("new", "reported"),
    [
        (LAYOUT.replace("expert: 4}", "expert: 4, later: 1}") + "  later: data\n", ["mesh axis 'later' is 1, and was not there"]),
        ("# A comment.\n" + LAYOUT.replace("name: mine", "name: other\nabout: The same."), []),
        (LAYOUT.replace("fsdp: 2", "fsdp: {size: 2, link: ici}"), ["mesh axis 'fsdp' is 2 over ici, and was 2"]),
        (LAYOUT + "move: {attention: gather}\n", []),
    ],
)  # fmt: skip
def test_what_moves_nothing_is_not_an_error(new, reported, typed):
    Path("mine.yaml").write_text(new, encoding="utf-8")
    code, out, _ = typed("check")
    assert code == 0
    ending = ", though it is declared in another form" if reported else ""
    assert out == "".join(f"{line}\n" for line in (f"{LOCK}: {STANDS}{ending}", *(f"  {text}" for text in reported)))


def test_the_order_of_the_axes_is_that_of_the_devices(typed):
    Path("mine.yaml").write_text(LAYOUT.replace("fsdp: 2, expert: 4", "expert: 4, fsdp: 2"), encoding="utf-8")
    code, out, _ = typed("check", "--json")
    assert code == 1
    assert json.loads(out)["findings"][0]["found"].split("\n")[1] == (
        "the order of the mesh axes is expert, fsdp, and was fsdp, expert"
    )


def test_another_link_moves_an_axis_to_other_devices(typed):
    Path("mine.yaml").write_text(LAYOUT.replace("expert: 4}", "expert: {size: 4, link: dcn}}"), encoding="utf-8")
    code, out, _ = typed("check")
    assert code == 1
    assert "The mesh axes have another order or other links: the same shards are on other devices.\n" in out
    assert "  found  the mesh moved, since" in out


def test_a_changed_default_is_reported(typed, monkeypatch):
    def larger(name, settings):
        return replace(build(name, settings), natural_batch=16)

    monkeypatch.setattr(request, "build", larger)
    assert typed("check")[0] == 1
    typed("lock", "mixtral-test", "--layout", "mine.yaml", "--batch", "8", "--out", "options.lock.json")
    assert typed("check", "options.lock.json")[0] == 0


def test_a_changed_model_is_reported_without_a_line_of_the_layout(typed, monkeypatch):
    def wider(name, settings):
        table = build(name, settings)
        first = replace(table.weights[0], dtype="float32", component="logits")
        return replace(table, weights=(first, *table.weights[1:]))

    monkeypatch.setattr(request, "build", wider)
    code, out, _ = typed("check", "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert finding["position"]["source"] == LOCK
    assert "the layout is unchanged: the model's table, a default or shardwright itself has changed" in finding["found"]
    line = Path(LOCK).read_text(encoding="utf-8").splitlines()[finding["position"]["line"] - 1]
    assert line.startswith('  {"name": "embedding.tokens"')


def test_several_locks_and_folders(typed):
    Path("locks").mkdir()
    typed("lock", "llama3-test", "--out", "locks")
    typed("lock", "mixtral-test", "--layout", "ep", "--out", "locks")
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    code, out, _ = typed("check", "locks", LOCK, "--json")
    assert code == 1
    assert [(one["file"], one["exit_code"]) for one in json.loads(out)["checked"]] == [
        ("locks/llama3-test.fsdp.lock.json", 0),
        ("locks/mixtral-test.ep.lock.json", 0),
        (LOCK, 1),
    ]
    assert typed("check", "locks", "gone.json", "--json")[0] == 2


def test_a_folder_without_locks(typed):
    Path("empty").mkdir()
    how = "Name the lock to check, or write one with: shardwright lock MODEL --layout NAME|FILE\n"
    reported = f"shardwright: empty has no file that ends in .lock.json. {how}"
    assert typed("check", "empty") == (2, "", reported)
    os.chdir("empty")
    assert typed("check") == (2, "", reported.replace("empty has", "this folder has"))


def test_it_is_checked_from_any_working_directory(typed, tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert typed("check", f"../../{LOCK}")[0] == 0
    (tmp_path / "mine.yaml").write_text(MOVED, encoding="utf-8")
    assert "  where  ../../mine.yaml:5:3: " in typed("check", f"../../{LOCK}")[1]


def test_a_linked_lock_finds_its_layout_and_stays_a_link(typed, tmp_path):
    Path("elsewhere").mkdir()
    Path("elsewhere/linked.json").symlink_to(tmp_path / LOCK)
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    assert typed("check", "elsewhere/linked.json")[0] == 1
    assert typed("check", "elsewhere/linked.json", "--update")[0] == 0
    assert Path("elsewhere/linked.json").is_symlink()
    assert typed("check", LOCK)[0] == 0


def test_a_plan_that_now_has_an_error_is_not_written(typed):
    before = Path(LOCK).read_bytes()
    Path("mine.yaml").write_text(LAYOUT.replace("fsdp: 2, expert: 4", "fsdp: 2, expert: 3"), encoding="utf-8")
    code, out, _ = typed("check", "--update")
    assert code == 1
    assert "error SW107: " in out
    assert "error SW601: A locked layout changes only together with its lock." in out
    assert Path(LOCK).read_bytes() == before


def test_what_cannot_be_compared_is_reported(typed):
    Path("mine.yaml").write_text(LAYOUT.replace("fsdp:   fsdp", "fsdp:   fsbp"), encoding="utf-8")
    code, out, err = typed("check")
    assert (code, err) == (1, "")
    assert out.startswith(f"{LOCK}: there is no plan to compare it with\n\nerror SW111: ")
    assert "  where  mine.yaml:4:11: roles of 'fsdp'\n" in out
    assert out.endswith(
        "\ninfo SW603: What was not checked is reported, with the reason.\n"
        f"  where  {LOCK}\n"
        "  found  tensors, collectives and memory: not checked\n"
        "  needed a plan, and there is none, for the reason in the findings of this lock\n"
    )


HOW = "Write one with: shardwright lock MODEL --layout NAME|FILE --out FILE"


def no_lock(why: str) -> str:
    return f"{LOCK}: this is not a lock: {why}. {HOW}"


FAULTS = [
    (
        lambda lock: lock.update(shardwright_lock=2),
        f"{LOCK}: a lock of format 2, and this shardwright reads format 1. Write it anew with this one's `shardwright "
        "lock`, or check it with the shardwright that wrote it.",
    ),
    (lambda lock: lock.update(shardwright_lock="1"), no_lock("'shardwright_lock' is not a whole number")),
    (lambda lock: lock.pop("shardwright_lock"), no_lock("it has no 'shardwright_lock'")),
    (lambda lock: lock.pop("request"), no_lock("'request' is not an object")),
    (lambda lock: lock["request"].pop("batch"), no_lock("'request' has no 'batch'")),
    (
        lambda lock: lock["request"].update(engine="mlx"),
        no_lock("'engine' of 'request' is 'mlx', and must be one of jax, torch"),
    ),
    (lambda lock: lock["request"].update(devices="8"), no_lock("'devices' of 'request' is not a whole number")),
    (lambda lock: lock["request"].update(chips=8), no_lock("'chips' of 'request' is not a text")),
    (
        lambda lock: lock["request"].update(mesh={"fsdp": 0.5}),
        no_lock("'fsdp' of 'mesh' of 'request' is not a whole number or 'auto'"),
    ),
    (lambda lock: lock["request"].update(set=["num_layers=2"]), no_lock("'set' of 'request' is not an object")),
    (lambda lock: lock["request"].update(move={"moe": 1}), no_lock("'moe' of 'move' of 'request' is not a text")),
    (lambda lock: lock["request"].update(expert_buffer="2"), no_lock("'expert_buffer' of 'request' is not a number")),
    (lambda lock: lock["request"].update(load_balance=1), no_lock("'load_balance' of 'request' is neither true nor false")),
    (lambda lock: lock["request"].update(by_default="batch"), no_lock("'by_default' of 'request' is not a list of texts")),
    (lambda lock: lock["request"].update(by_default=["lr"]), no_lock("'by_default' of 'request' has 'lr', which has no default")),
    (lambda lock: lock.pop("declaration"), no_lock("'declaration' is not an object")),
    (lambda lock: lock["declaration"].pop("roles"), no_lock("'roles' of 'declaration' is not an object")),
    (lambda lock: lock["declaration"]["roles"].update(fsdp="fsdp"), no_lock("'fsdp' of 'roles' of 'declaration' is not an object")),
    (lambda lock: lock.update(tensors={}), no_lock("'tensors' is not a list")),
    (lambda lock: lock["tensors"][0].pop("in_use"), no_lock("'tensors' 0 has no 'in_use'")),
    (lambda lock: lock["tensors"][0].update(gradient=[]), no_lock("'gradient' of 'tensors' 0 is not an object")),
    (lambda lock: lock["collectives"][1].update(axes=None), no_lock("'axes' of 'collectives' 1 is not a list of texts")),
    (lambda lock: lock["memory"].pop("weights_bytes"), no_lock("'memory' has no 'weights_bytes'")),
    (lambda lock: lock.update(compiled=[]), no_lock("'compiled' is not an object")),
    (lambda lock: lock.update(compiled={"target": "cpu:8"}), no_lock("'versions' of 'compiled' is not an object")),
    (
        lambda lock: lock["request"].update(model="mixtral-tset"),
        f"{LOCK}: its request cannot be planned: no model 'mixtral-tset'. Did you mean 'mixtral-test'?",
    ),
    (
        lambda lock: lock["request"].update(set={"num_layer": "2"}),
        f"{LOCK}: its request cannot be planned: mixtral-test with --set num_layer=2: no dimension 'num_layer'. Did you mean 'num_layers'?",
    ),
    (
        lambda lock: lock["request"].update(layout="epp"),
        f"{LOCK}: its request cannot be planned: no layout is called 'epp'. Did you mean 'pp'? "
        "A layout of your own is given by its path, as in ./epp.yaml.",
    ),
    (
        lambda lock: lock["request"].update(layout="./gone/x.yaml"),
        f"{LOCK}: its request cannot be planned: gone/x.yaml: no such file; the folder gone does not exist.",
    ),
    (
        lambda lock: lock["request"].update(batch=0, by_default=[]),
        f"{LOCK}: its request cannot be planned: --batch is 0, and must be at least 1.",
    ),
    (
        lambda lock: lock["request"].update(chips="v9:2x2"),
        f"{LOCK}: its request cannot be planned: --chips: ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "why"), FAULTS)
def test_a_lock_that_cannot_be_checked_is_one_message(edit, why, typed):
    change(Path(LOCK), edit)
    before = Path(LOCK).read_bytes()
    code, out, err = typed("check", "--update")
    assert (code, out) == (2, "")
    assert err.startswith(f"shardwright: {why}")
    assert why.endswith((": ", "planned: ")) or err == f"shardwright: {why}\n"
    assert Path(LOCK).read_bytes() == before
    code, out, _ = typed("check", "--json")
    reported = json.loads(out)
    assert (code, reported["error"]["exit_code"], reported["checked"][0]["exit_code"]) == (2, 2, 2)
    assert reported["error"]["message"].startswith(why)


def test_a_missing_file(typed):
    Path(LOCK).rename("kept.json")
    assert typed("check", LOCK)[2] == f"shardwright: {LOCK}: no such file.\n"
    Path("mine.yaml").unlink()
    code, _, err = typed("check", "kept.json")
    assert code == 2
    assert err == "shardwright: kept.json: its request cannot be planned: mine.yaml: no such file.\n"


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_truncated_lock(part, typed):
    text = Path(LOCK).read_text(encoding="utf-8")
    Path(LOCK).write_text(text[: int(len(text) * part)], encoding="utf-8")
    code, out, err = typed("check")
    assert (code, out) == (2, "")
    assert err.startswith(f"shardwright: {LOCK}:")
    assert ": not JSON: " in err
    assert err.endswith(f"`lock` never writes half a file: something else has changed it. {HOW}\n")


def test_marks_of_a_merge(typed):
    text = Path(LOCK).read_text(encoding="utf-8")
    Path(LOCK).write_text(text.replace(' "memory"', '<<<<<<< HEAD\n "memory"'), encoding="utf-8")
    code, _, err = typed("check")
    assert code == 2
    assert "    <<<<<<< HEAD\n    ^\n" in err


def test_a_plan_is_not_a_lock(typed):
    Path("plan.json").write_text(typed("plan", "llama3-test", "--json")[1], encoding="utf-8")
    assert typed("check", "plan.json") == (
        2,
        "",
        f"shardwright: plan.json: this is not a lock: it has no 'shardwright_lock'. {HOW}\n",
    )


def test_a_lock_with_the_former_name_of_an_option_holds(typed):
    """``micro_steps`` was what ``microbatches`` is called now, as an option and in the list of defaults."""
    path = Path(LOCK)
    text = path.read_text(encoding="utf-8")
    assert '"microbatches"' in text
    path.write_text(text.replace('"microbatches"', '"micro_steps"'), encoding="utf-8")
    assert typed("check", LOCK)[0] == 0
    path.write_text(text.replace('"microbatches": 1', '"micro_steps": 2'), encoding="utf-8")
    code, out, _ = typed("check", LOCK)
    assert code == 1
    assert "microbatches" in out


def test_a_lock_with_both_names_of_an_option_is_refused(typed):
    path = Path(LOCK)
    path.write_text(
        path.read_text(encoding="utf-8").replace('"microbatches": 1', '"microbatches": 1, "micro_steps": 2')
    )
    code, _, err = typed("check", LOCK)
    assert code == 2
    assert "'request' has 'micro_steps' and 'microbatches', which are one option" in err
