"""A lock: read back as it was written, in one order, one line a row, and what of it counts as moved."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace

import pytest

from shardwright import InputError, Request, load_layout, make_plan, preset_names
from shardwright.locks.lock import Lock, compiled_program, is_lock, line_of, lock_of, moved, read_lock
from shardwright.locks.lock_request import LockRequest
from shardwright.models import build

PROGRAM = {
    "collectives": [
        {
            "component": "moe",
            "phase": "forward",
            "kind": "all-to-all",
            "axes": ["expert"],
            "bytes_per_device": 64,
            "count_per_step": 2,
            "dtypes": ["f32"],
            "tensors": ["router.dispatched"],
            "source": "moe.py:3",
            "overlapped": None,
            "in_loop": True,
            "num_ops": 1,
            "ragged": True,
        },
        {
            "component": None,
            "phase": None,
            "kind": "all-reduce",
            "axes": ["fsdp", "expert"],
            "bytes_per_device": 4,
            "count_per_step": 1,
            "dtypes": ["f32", "bf16"],
            "tensors": [],
            "source": None,
            "overlapped": None,
            "in_loop": False,
            "num_ops": 1,
        },
        {
            "component": "moe",
            "phase": "forward",
            "kind": "all-to-all",
            "axes": ["expert"],
            "bytes_per_device": 64,
            "count_per_step": 4,
            "dtypes": ["f32"],
            "tensors": ["router.returned"],
            "source": "moe.py:9",
            "overlapped": None,
            "in_loop": True,
            "num_ops": 2,
            "ragged": True,
        },
    ],
    "memory": {
        "arguments_bytes": 10,
        "temporaries_bytes": 20,
        "output_bytes": 10,
        "aliased_bytes": 10,
        "peak_bytes": 30,
        "largest": [{"bytes_per_device": 20}],
    },
    "compile_seconds": 1.5,
    "flops_per_device": 7,
}
VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.42"}


def lock(layout: str = "ep", compiled: dict | None = None, vocab: int = 2048, **sizes: int) -> Lock:
    table = build("mixtral-test", {"num_layers": "2", "vocab": str(vocab)})
    declared = load_layout(layout)
    request = Request(layout=declared, table=table, batch=8, length=64, mesh_sizes=sizes, devices=8)
    asked = LockRequest(
        model="mixtral-test",
        layout=layout,
        mesh=sizes,
        devices=8,
        engine="jax",
        batch=8,
        length=64,
        dtype="float32",
        weights_dtype="float32",
        moments_dtype="float32",
        remat="full",
        microbatches=1,
    )
    return lock_of(asked, declared, make_plan(request), compiled)


def compiled(program: dict | None = None) -> dict:
    return compiled_program("cpu:8", PROGRAM if program is None else program, VERSIONS)


@pytest.mark.parametrize("layout", preset_names())
def test_it_is_read_back_as_it_was_written(layout):
    one = lock(layout, compiled())
    again = read_lock(json.loads(one.text()), "x.json")
    assert again.text() == one.text()
    assert again.to_json() == one.to_json()
    assert again.request == one.request
    assert not moved(one, again).moved


def test_a_padded_vocabulary_is_locked_in_its_size_in_memory():
    one = lock("tp", vocab=257, data=2, tensor=4)
    again = read_lock(json.loads(one.text()), "x.json")
    assert again.text() == one.text()
    shapes = {row["name"]: row["shape"] for row in again.plan["tensors"]}
    assert shapes["logits.kernel"] == [128, 260]
    assert "unpadded_shape" not in one.text()
    assert moved(lock("tp", vocab=256, data=2, tensor=4), one).moved


def test_every_row_has_a_line_and_every_line_is_a_row():
    one = lock(compiled=compiled())
    rows = [*one.plan["training_only"], *one.plan["tensors"], *one.plan["collectives"], *one.compiled["collectives"]]
    lines = [line.strip().rstrip(",") for line in one.text().splitlines()]
    assert [json.loads(line) for line in lines if line.startswith("{") and line != "{"] == rows
    assert json.loads(one.text()) == one.to_json()
    assert one.text().endswith("\n}\n")


def test_no_axis_of_size_one_stands_beside_a_tensor():
    one = lock()
    assert one.plan["mesh"]["data"] == 1
    for row in (*one.plan["tensors"], *one.plan["collectives"]):
        assert "data" not in row.get("axes", [])
        assert "data" not in row.get("gradient", {})
        assert "/data" not in row.get("in_use", "") + (row.get("at_rest") or "")
    # The same layout without the axis is locked in the same rows.
    other = lock("ep")
    assert one.plan["tensors"] == other.plan["tensors"]


def test_a_collective_names_each_of_its_tensors_once():
    # A ring passes the same keys on, several times a layer.
    ring = replace(load_layout("ep-as-cp"), move_attention="ring")
    request = Request(layout=ring, table=build("mixtral-test"), batch=8, length=64, devices=8)
    rows = lock_of(lock().request, ring, make_plan(request)).plan["collectives"]
    assert [row["kind"] for row in rows if row["component"] == "attention"].count("permute") >= 2
    for row in rows:
        assert len(set(row["tensors"])) == len(row["tensors"])


def test_what_was_compiled_is_in_an_order_of_its_own_and_rows_that_are_one_are_added_up():
    part = compiled()
    assert [(row["kind"], row["count_per_step"]) for row in part["collectives"]] == [
        ("all-reduce", 1),
        ("all-to-all", 6),
    ]
    assert part["collectives"][1]["ragged"] is True
    assert part["collectives"][0]["dtypes"] == ["bf16", "f32"]
    assert part["memory"] == {name: size for name, size in PROGRAM["memory"].items() if name != "largest"}
    shuffled = deepcopy(PROGRAM)
    for seed in range(5):
        random.Random(seed).shuffle(shuffled["collectives"])
        assert compiled(shuffled) == part


def test_a_compiled_program_moves_by_what_it_moves_and_holds():
    before = lock(compiled=compiled())
    assert moved(before, lock()).compiled is None
    same = deepcopy(PROGRAM)
    same["collectives"][0] |= {"source": "moe.py:99", "num_ops": 5, "overlapped": True}
    same |= {"compile_seconds": 99.0}
    assert not moved(before, lock(compiled=compiled(same))).moved
    for change in ({"bytes_per_device": 65}, {"axes": ["fsdp"]}, {"kind": "all-gather"}, {"count_per_step": 3}):
        other = deepcopy(PROGRAM)
        other["collectives"][0] |= change
        found = moved(before, lock(compiled=compiled(other)))
        assert found.moved
        assert found.compiled.collectives
        assert not found.tensors
    other = deepcopy(PROGRAM)
    other["memory"]["temporaries_bytes"] += 1
    found = moved(before, lock(compiled=compiled(other)))
    assert found.moved
    assert found.compiled.memory["temporaries_bytes"] == (20, 21)
    assert found.compiled.collectives == ()
    # 2 and 4 times 64 bytes, and 4 bytes once.
    assert found.compiled.bytes_per_step == (6 * 64 + 4, 6 * 64 + 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["tensors"][0].update(gradient={"fsdp": "all-reduce"}),
        lambda data: data["tensors"][0].update(dtype="float16"),
        lambda data: data["tensors"][0].update(shape=[512, 512]),
        lambda data: data["collectives"][0].update(ragged=True),
        lambda data: data["memory"].update(activations_bytes=1),
        lambda data: data.update(mesh={"expert": 4, "fsdp": 2, "data": 1}),
        lambda data: data.update(links={"fsdp": "dcn"}),
        lambda data: data["tensors"].pop(),
    ],
)
def test_one_cell_is_enough_to_have_moved(change):
    one = lock()
    data = deepcopy(one.to_json())
    change(data)
    assert moved(read_lock(data, "x.json"), one).moved


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(mesh={"fsdp": 2, "unused": 1, "expert": 4}),
        lambda data: data.update(links={"data": "dcn", "fsdp": "ici"}),
        lambda data: data["tensors"][0]["gradient"].update(data="all-reduce"),
        lambda data: data["tensors"].reverse(),
        lambda data: data["collectives"].reverse(),
        lambda data: data["declaration"].update(name="other"),
        lambda data: data.update(layout="other"),
    ],
)
def test_what_moves_nothing(change):
    one = lock()
    data = deepcopy(one.to_json())
    change(data)
    assert not moved(read_lock(data, "x.json"), one).moved


def test_the_line_of_a_tensor():
    text = lock().text()
    line = text.splitlines()[line_of(text, ["gone", "layers.moe.gate"]) - 1]
    assert json.loads(line.rstrip(","))["name"] == "layers.moe.gate"
    assert line_of(text, ["gone"]) == line_of(text, []) == 1


def test_other_formats_and_other_values():
    data = lock().to_json()
    assert is_lock(data)
    assert not is_lock([])
    with pytest.raises(InputError, match=r"^x\.json: a lock of format 7, and this shardwright reads format 1\. "):
        read_lock({**data, "shardwright_lock": 7}, "x.json")
    with pytest.raises(InputError, match=r"^x\.json: this is not a lock: the lock is not an object\. Write one with: "):
        read_lock([], "x.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda part: part.update(target=8), "'target' of 'compiled' is not a text"),
        (lambda part: part.update(versions={"jax": 1}), "'jax' of 'versions' of 'compiled' is not a text"),
        (lambda part: part["memory"].pop("peak_bytes"), "'memory' of 'compiled' has no 'peak_bytes'"),
        (lambda part: part["collectives"][0].update(component="head"), "'component' of 'collectives' 0 of 'compiled' is 'head', which is no component"),
        (lambda part: part["collectives"][0].update(phase=1), "'phase' of 'collectives' 0 of 'compiled' is not a text"),
        (lambda part: part["collectives"][1].pop("axes"), "'collectives' 1 of 'compiled' has no 'axes'"),
    ],
)  # fmt: skip
def test_a_compiled_part_that_is_none(change, why):
    data = deepcopy(lock(compiled=compiled()).to_json())
    change(data["compiled"])
    with pytest.raises(InputError) as caught:
        read_lock(data, "x.json")
    assert str(caught.value).startswith(f"x.json: this is not a lock: {why}. ")
