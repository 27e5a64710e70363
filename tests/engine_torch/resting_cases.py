"""Modules whose weights rest as codes, on meshes of four and eight ranks: each against one process and against high precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

import shardwright as sw
from shardwright.checkpoint import open_newest
from shardwright.core.boxes.box import Box
from tests.engine_torch.own_modules import POWER_OF_TWO
from tests.engine_torch.own_resting import DOORS, MESHES, first_codes, resumed, trained
from tests.engine_torch.ranks import Ranks

RECIPES = ("mxfp8", "fp8-block", "fp8-row", "fp8-current", POWER_OF_TWO, "fp8-delayed", "nvfp4")
ON_MESHES = [kind for kind in MESHES if kind != "one"]
MANY_STEPS = 10
HEAD = 128
OWN_ORDER, MEASURED = 2**-4, 2**-3
"""How far another mesh may move an output: sums are added in another order, which may move a code to its neighbour. Factors of earlier steps
are measured anew where another number of ranks has tokens, which moves the codes of both operands."""


class RestingCase(NamedTuple):
    recipe: str
    kind: str

    def __str__(self) -> str:
        return f"{self.recipe} {self.kind}"


CASES = [RestingCase(*pair) for pair in product(RECIPES, ON_MESHES)]


class Checked(NamedTuple):
    """``codes``: the tensors of codes and scales that equal those of one process. ``loads``: the loads, each onto a mesh through a door, after
    which all bits were those of the save. ``moved``: how far the next output was moved by a mesh at most, as a share of its norm."""

    codes: int
    loads: int
    moved: float


def checked(case: RestingCase, eight: Ranks, folder: Path, num: int, onto: Sequence[str]) -> Checked:
    """Raises AssertionError where anything differs."""
    ranks = on_ranks(case.kind, eight)
    answers = ranks.run(trained, case.kind, case.recipe, str(folder), num)
    for rank, (wrong, _) in enumerate(answers):
        assert not wrong, (str(case), rank, wrong[:5])
    eight.first(1).run(first_codes, case.recipe, str(folder))
    codes = same_tensors(folder / "first", folder / "alone")
    moved, loads = [0.0], 0
    for kind in onto:
        for rank, outputs in enumerate(on_ranks(kind, eight).run(resumed, kind, case.recipe, str(folder), num)):
            needed = answers[rank % len(answers)][1]
            for output in outputs:
                if kind == case.kind:
                    np.testing.assert_array_equal(output, needed)
                moved.append(float(np.linalg.norm(output - needed) / np.linalg.norm(needed)))
        for door in DOORS:
            same_tensors(folder / "ours", folder / f"{door} on {kind}")
            loads += 1
    assert max(moved) <= (MEASURED if case.recipe == "fp8-delayed" else OWN_ORDER), (str(case), max(moved))
    return Checked(codes=codes, loads=loads, moved=max(moved))


def on_ranks(kind: str, eight: Ranks) -> Ranks:
    num = int(np.prod(list(MESHES[kind].values()), initial=1))
    return eight.first(num)


def same_tensors(first: Path, second: Path) -> int:
    """The number of tensors of two checkpoints, which must have equal names and bits."""
    ours, theirs = (open_newest(checkpoint) for checkpoint in (first, second))
    assert ours.tensors.keys() == theirs.tensors.keys(), ours.tensors.keys() ^ theirs.tensors.keys()
    for name, info in ours.tensors.items():
        box = Box.whole(tuple(info.shape))
        pair = [checkpoint.read_boxes(name, [box], raw=True)[0].tobytes() for checkpoint in (ours, theirs)]
        assert pair[0] == pair[1], (name, str(first))
    return len(ours.tensors)


class PlannedBytes(NamedTuple):
    """Of a layer's matrices. ``gathered``: by each all-gather on a rank, and ``at_rest`` on a rank."""

    gathered: int
    at_rest: int


def planned_bytes(recipe: str, width: int, hidden: int, kv_width: int, ranks: int) -> PlannedBytes:
    """By the plan of a Llama of such sizes, whose copies of a weight are gathered together."""
    sizes = {
        "num_layers": 1,
        "embed": width,
        "mlp": hidden,
        "num_kv_heads": kv_width // HEAD,
        "head_dim": HEAD,
        "num_heads": width // HEAD,
    }
    request = sw.Request(
        layout=sw.load_layout("fsdp"),
        table=sw.model_table("llama3-8b", {name: str(size) for name, size in sizes.items()}),
        batch=ranks,
        length=128,
        mesh_sizes={"fsdp": ranks},
        engine="torch",
        remat="none",
        weights_dtype="bfloat16",
        master_dtype="float32",
        precision=replace(sw.load_recipe(recipe), rest_quantized=True),
    )
    plan = sw.make_plan(request)
    assert not plan.errors, plan.errors
    gathers = [gather for gather in plan.collectives if gather.kind == "all-gather" and gather.dtype == "uint8"]
    at_rest = 0
    for array in (array for weight in plan.quantized for copy in weight.copies for array in copy.arrays):
        itemsize = 1 if "8" in array.dtype else 4
        shards = plan.mesh.size(array.at_rest.axes)
        at_rest += int(np.prod(list(array.shape.values()), initial=1)) * itemsize // shards
    return PlannedBytes(
        gathered=sum(gather.bytes_per_device * gather.count_per_step for gather in gathers), at_rest=at_rest
    )
