"""What moves between two plans, on plans small enough to work out by hand and on the pair of the design."""

from __future__ import annotations

import json
from copy import deepcopy

from shardwright import Request, load_layout, make_plan
from shardwright.locks.difference import CollectiveChange, TensorChange, difference, without_size_one
from shardwright.models import build

PLAN = {
    "model": "m",
    "layout": "l",
    "mesh": {"data": 1, "fsdp": 2, "expert": 4},
    "engine": "jax",
    "batch": 8,
    "length": 16,
    "tensors": [
        {
            "name": "attention.q",
            "kind": "weight",
            "component": "attention",
            "num": 3,
            "at_rest": "embed/fsdp heads",
            "in_use": "embed heads",
            "bytes_per_device": 512,
        },
        {
            "name": "residual.stream",
            "kind": "activation",
            "component": "residual",
            "num": 3,
            "in_use": "batch/data/fsdp length/expert embed",
            "bytes_per_device": 64,
        },
    ],
    "collectives": [
        {
            "component": "attention",
            "phase": "forward",
            "kind": "all-gather",
            "axes": ["fsdp"],
            "bytes_per_device": 1024,
            "count_per_step": 3,
        }
    ],
    "memory": {"weights_bytes": 1536, "total_bytes_per_device": 1600},
    "findings": [],
}


def planned(layout: str, **sizes: int) -> dict:
    table = build("deepseek3-test")
    request = Request(layout=load_layout(layout), table=table, batch=8, length=128, mesh_sizes=sizes, devices=8)
    return make_plan(request).to_json()


def test_a_plan_does_not_differ_from_itself():
    same = difference(PLAN, deepcopy(PLAN))
    assert same.tensors == ()
    assert same.collectives == ()
    assert same.num_unchanged == 2
    assert same.memory == {"weights_bytes": (1536, 1536), "total_bytes_per_device": (1600, 1600)}


def test_a_moved_tensor_has_both_specs_and_both_sizes():
    other = deepcopy(PLAN)
    other["tensors"][0] |= {"at_rest": "embed/fsdp/expert heads", "bytes_per_device": 128}
    assert difference(PLAN, other).tensors == (
        TensorChange(
            name="attention.q",
            kind="weight",
            component="attention",
            num=3,
            change="moved",
            at_rest=("embed/fsdp heads", "embed/fsdp/expert heads"),
            in_use=("embed heads", "embed heads"),
            bytes_per_device=(512, 128),
        ),
    )


def test_bytes_alone_are_a_difference():
    other = deepcopy(PLAN)
    other["tensors"][1]["bytes_per_device"] = 32
    (change,) = difference(PLAN, other).tensors
    assert (change.name, change.bytes_per_device) == ("residual.stream", (64, 32))


def test_tensors_of_one_side_only_are_added_or_removed():
    other = deepcopy(PLAN)
    gone = other["tensors"].pop(0)
    other["tensors"].append({**gone, "name": "attention.k"})
    changes = {change.name: change for change in difference(PLAN, other).tensors}
    assert changes["attention.q"].change == "removed"
    assert changes["attention.q"].at_rest == ("embed/fsdp heads", None)
    assert changes["attention.k"].change == "added"
    assert changes["attention.k"].bytes_per_device == (None, 512)


def test_an_axis_of_size_one_moves_nothing():
    other = deepcopy(PLAN)
    other["tensors"][1]["in_use"] = "batch/fsdp length/expert embed"
    other["collectives"][0]["axes"] = ["data", "fsdp"]
    found = difference(PLAN, other)
    assert found.tensors == ()
    assert found.collectives == ()


def test_an_axis_is_left_out_on_the_side_where_it_has_size_one():
    other = deepcopy(PLAN)
    other["mesh"] = {"data": 2, "fsdp": 1, "expert": 4}
    specs = {change.name: change.in_use for change in difference(PLAN, other).tensors}
    assert specs["residual.stream"] == ("batch/fsdp length/expert embed", "batch/data length/expert embed")
    assert without_size_one("a/x/y b/z", {"x": 2, "y": 1, "z": 1}) == "a/x b"


def test_collectives_are_compared_in_bytes_and_executions_of_a_step():
    other = deepcopy(PLAN)
    # The same bytes in other pieces: not the same number of executions.
    other["collectives"] = [
        {**PLAN["collectives"][0], "bytes_per_device": 512, "count_per_step": count} for count in (2, 4)
    ]
    assert difference(PLAN, other).collectives == (
        CollectiveChange(
            component="attention",
            phase="forward",
            kind="all-gather",
            axes=("fsdp",),
            bytes_per_step=(3072, 3072),
            count_per_step=(3, 6),
        ),
    )
    other["collectives"][0]["kind"] = "all-reduce"
    found = difference(PLAN, other)
    moved = {change.kind: (change.bytes_per_step, change.count_per_step) for change in found.collectives}
    assert moved == {"all-gather": ((3072, 2048), (3, 4)), "all-reduce": ((0, 1024), (0, 2))}
    assert found.bytes_per_step == (3072, 3072)


def test_ep_against_ep_as_cp_moves_the_sequence_and_no_weight():
    before, after = planned("ep"), planned("ep-as-cp")
    found = difference(before, after)
    assert {change.kind for change in found.tensors} == {"activation"}
    changes = {change.name: change for change in found.tensors}
    assert changes["residual.stream"].in_use == ("batch/fsdp/expert length embed", "batch/fsdp length/expert embed")
    # Four times the keys: the axis of size 4 no longer cuts them.
    assert changes["attention.latent_attended"].bytes_per_device == (40_960, 163_840)
    assert {(change.component, change.axes) for change in found.collectives} == {("attention", ("expert",))}
    gathered = next(change for change in found.collectives if change.phase == "forward")
    # The latent in each of four layers; the place and the document of each key, 4 rows of 128, once.
    assert gathered.bytes_per_step == (0, 4 * 163_840 + 2 * 4 * 128 * 4)
    assert gathered.kind == "all-gather"
    # What is the same on both sides is not there: the experts' own tensors.
    assert not [name for name in changes if name.startswith("moe.")]
    assert found.num_unchanged + len(found.tensors) == len(before["tensors"])


def test_the_other_way_round_is_the_mirror_image():
    there, back = (
        difference(*pair) for pair in ((planned("hsdp"), planned("fsdp")), (planned("fsdp"), planned("hsdp")))
    )
    assert {t.name: t.bytes_per_device for t in there.tensors} == {
        t.name: t.bytes_per_device[::-1] for t in back.tensors
    }
    assert there.memory == {part: sizes[::-1] for part, sizes in back.memory.items()}


def test_json_has_before_and_after_everywhere():
    found = difference(planned("fsdp"), planned("hsdp"))
    data = json.loads(json.dumps(found.to_json()))
    assert data["before"]["mesh"] == {"data": 1, "fsdp": 8}
    assert data["after"]["layout"] == "hsdp"
    row = next(row for row in data["tensors"] if row["name"] == "embedding.tokens")
    assert row["bytes_per_device"] == {"before": 131_072, "after": 262_144}
    assert row["at_rest"] == {"before": "vocab embed/fsdp", "after": "vocab embed/fsdp"}
    assert data["memory"]["weights_bytes"]["after"] > data["memory"]["weights_bytes"]["before"]
